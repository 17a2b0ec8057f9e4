"""Reading and writing cluster files: one strict form, YAML or JSON by extension."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from trimtab.cluster.cluster import Cluster
from trimtab.errors import TrimtabError

_MAX_BYTES = 4 * 1024 * 1024
_ADAPTER: TypeAdapter[Cluster] = TypeAdapter(Cluster)


class StrictLoader(yaml.SafeLoader):
    """YAML without its surprises: no repeated keys, no aliases (which can grow without bound)."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.MarkedYAMLError(
                problem="aliases are not allowed; write the value out",
                problem_mark=self.peek_event().start_mark,  # type: ignore[no-untyped-call]
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key must be a plain word", problem_mark=key.start_mark)
            if key.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"key {key.value!r} appears twice", problem_mark=key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def load_cluster(path: str | Path) -> Cluster:
    """Read a cluster file, refusing anything that is not exactly in the form of `Cluster`.

    Raises:
        TrimtabError: naming the file, the place inside it, and the remedy.
    """
    path = Path(path)
    form = _form(path)
    return parse_cluster(_read(path), source=str(path), form=form)


def parse_cluster(text: str, *, source: str, form: str = "yaml") -> Cluster:
    """Read a cluster from text; `source` is what errors call it."""
    try:
        tree = (
            json.loads(text, object_pairs_hook=_unique) if form == "json" else yaml.load(text, StrictLoader)
        )
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise TrimtabError(f"{source}: not valid {form.upper()}: {reason}") from None
    if not isinstance(tree, dict):
        raise TrimtabError(
            f"{source}: holds {_called(tree)} where a cluster is due: a mapping with version, devices and hosts"
        )
    if isinstance(tree.get("version"), int) and not isinstance(tree["version"], bool):
        _check_version_first(tree["version"], source)
    try:
        # Through JSON, whose mappings the strict schema takes for what they stand for.
        return _ADAPTER.validate_json(json.dumps(tree, default=str))
    except ValidationError as error:
        raise TrimtabError(f"{source}: " + "; ".join(_say(e) for e in error.errors()[:5])) from None


def save_cluster(cluster: Cluster, path: str | Path) -> None:
    """Write a cluster file that `load_cluster` reads back as an equal cluster."""
    path = Path(path)
    tree = _ADAPTER.dump_python(cluster, mode="json", exclude_none=True)
    text = (
        json.dumps(tree, indent=2) + "\n" if _form(path) == "json" else yaml.safe_dump(tree, sort_keys=False)
    )
    path.write_text(text, encoding="utf-8")


def _form(path: Path) -> str:
    suffix = path.suffix.lower()
    if suffix == ".json":
        return "json"
    if suffix in (".yaml", ".yml"):
        return "yaml"
    raise TrimtabError(f"{path}: a cluster file ends in .yaml, .yml or .json; rename it")


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise TrimtabError(f"{path}: larger than {_MAX_BYTES >> 20} MiB; is this a cluster file?")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise TrimtabError(f"{path}: not UTF-8 text; is this a cluster file?") from None
    except OSError as error:
        raise TrimtabError(f"{path}: cannot be read: {error.strerror}; check the path") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) != len(pairs):
        twice = next(key for i, (key, _) in enumerate(pairs) if key in {k for k, _ in pairs[:i]})
        raise ValueError(f"key {twice!r} appears twice")
    return tree


def _check_version_first(version: int, source: str) -> None:
    # Another version may have other keys: complaining of those would mislead.
    from trimtab.cluster.cluster import SCHEMA_VERSION

    if version != SCHEMA_VERSION:
        raise TrimtabError(
            f"{source}: version: {version} is not read by this trimtab, which reads version {SCHEMA_VERSION}; "
            "install the trimtab that wrote the file, or write the file anew"
        )


def _say(error: Any) -> str:
    place = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in error["loc"] if p != "[key]").lstrip(
        "."
    )
    place = place or "the cluster"
    kind = error["type"]
    if kind in ("unexpected_keyword_argument", "extra_forbidden"):
        return f"{place}: unknown key; remove it or correct its spelling"
    if kind in ("missing", "missing_argument"):
        return f"{place}: missing; add it"
    if kind == "value_error":
        return f"{place}: {error['ctx']['error']}" if error["loc"] else str(error["ctx"]["error"])
    if kind == "string_pattern_mismatch":
        return f"{place}: {error['input']!r} is no name; use up to 32 letters, digits, '-' or '_'"
    message = error["msg"].removeprefix("Input ")
    return f"{place}: {message}, not {_called(error['input'])}"


def _called(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
