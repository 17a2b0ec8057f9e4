"""Files in one strict form: JSON or YAML that must match a pydantic dataclass exactly, refused by name and place.

Cluster, plan and workload files are all read and written here, so that their errors read alike.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError

from trimtab.errors import TrimtabError

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
"""For every pydantic dataclass that is stored in a file."""

T = TypeVar("T")
Form = Literal["json", "yaml"]

_ERRORS_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class FileFormat(Generic[T]):
    """One kind of file."""

    adapter: TypeAdapter[T]
    noun: str
    """What errors call the content: "a plan"."""

    version: int
    """The value of the key `version` that is supported."""

    remedy: str
    """What the user should do about a file that cannot be used."""

    max_bytes: int

    def load(self, path: str | Path, form: Form = "json") -> T:
        """Read a file.

        Raises:
            TrimtabError: naming the file, the place inside it, and the remedy.
        """
        path = Path(path)
        try:
            if path.stat().st_size > self.max_bytes:
                raise TrimtabError(f"{path}: larger than {self.max_bytes >> 20} MiB; is this {self.noun}?")
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise TrimtabError(f"{path}: not UTF-8 text; is this {self.noun}?") from None
        except OSError as error:
            raise TrimtabError(f"{path}: cannot be read: {error.strerror}; check the path") from None
        return self.parse(text, source=str(path), form=form)

    def parse(self, text: str, *, source: str, form: Form = "json") -> T:
        """Read from text; `source` is what errors call it."""
        try:
            tree = (
                json.loads(text, object_pairs_hook=_unique)
                if form == "json"
                else yaml.load(text, _StrictLoader)
            )
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise TrimtabError(f"{source}: not valid {form.upper()}: {reason}; {self.remedy}") from None
        if not isinstance(tree, dict):
            raise TrimtabError(f"{source}: holds {_shortened(tree)}, not {self.noun}; {self.remedy}")
        # Checked first: another version may have other keys, and errors about those would mislead.
        version = tree.get("version", self.version)
        if isinstance(version, int) and version != self.version:
            raise TrimtabError(
                f"{source}: version mismatch: found {version}, expected {self.version}; {self.remedy}"
            )
        try:
            # YAML goes through JSON, whose lists and mappings the strict schema accepts for tuples and dataclasses.
            return self.adapter.validate_json(text if form == "json" else json.dumps(tree, default=str))
        except ValidationError as error:
            mistakes = "; ".join(_described(e, self.noun) for e in error.errors()[:_ERRORS_SHOWN])
            raise TrimtabError(f"{source}: {mistakes}; {self.remedy}") from None


def replace_file(path: str | Path, text: str) -> None:
    """Write a file in one step: an existing one is replaced at the end, so that none is left half-written.

    Raises:
        TrimtabError: a folder that does not exist or cannot be written to.
    """
    path = Path(path)
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise TrimtabError(
            f"{path}: cannot be written: {error.strerror}; check the folder {path.parent}"
        ) from None
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).chmod(path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~_umask())
        Path(name).replace(path)
    except OSError as error:
        raise TrimtabError(f"{path}: cannot be written: {error.strerror}; check the path") from None
    finally:
        Path(name).unlink(missing_ok=True)


def require_writable(path: str | Path, remedy: str = "") -> None:
    """Refuse a file that `replace_file` could not write, before the work whose result it is for.

    Raises:
        TrimtabError: as `replace_file`; it ends with `remedy`.
    """
    path = Path(path)
    try:
        if path.is_dir():
            raise IsADirectoryError(21, "it is a folder")
        with tempfile.NamedTemporaryFile(prefix=f".{path.name}.", dir=path.parent):
            pass
    except OSError as error:
        remedy = remedy or f"check the folder {path.parent}"
        raise TrimtabError(f"{path}: cannot be written: {error.strerror}; {remedy}") from None


class _StrictLoader(yaml.SafeLoader):
    """YAML without its surprises: no repeated keys, no aliases (which can grow without bound)."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.MarkedYAMLError(
                problem="aliases are not allowed; write the value out",
                problem_mark=self.peek_event().start_mark,  # type: ignore[no-untyped-call]
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key must be a plain word", problem_mark=key.start_mark)
            if key.value in keys:
                raise yaml.MarkedYAMLError(
                    problem=f"key {key.value!r} appears twice", problem_mark=key.start_mark
                )
            keys.add(key.value)
        return super().construct_mapping(node, deep)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in pairs:
        if key in tree:
            raise ValueError(f"key {key!r} appears twice")
        tree[key] = value
    return tree


def _described(error: Any, noun: str) -> str:
    """One error of pydantic in words, with the place as a user would write it."""
    place = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in error["loc"] if p != "[key]")
    place = place.lstrip(".") or noun
    kind = error["type"]
    if kind in ("unexpected_keyword_argument", "extra_forbidden"):
        return f"{place}: unknown key"
    if kind in ("missing", "missing_argument"):
        return f"{place}: missing"
    if kind == "value_error":
        return f"{place}: {error['ctx']['error']}" if error["loc"] else str(error["ctx"]["error"])
    if kind == "string_pattern_mismatch":
        return f"{place}: {error['input']!r} is not a valid name; use up to 32 letters, digits, '-' or '_'"
    return f"{place}: {error['msg'].removeprefix('Input ')}, not {_shortened(error['input'])}"


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
