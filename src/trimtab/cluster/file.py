"""Reading and writing cluster files: one strict form, YAML or JSON by extension."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter

from trimtab.cluster.cluster import SCHEMA_VERSION, Cluster
from trimtab.errors import TrimtabError
from trimtab.strict_files import FileFormat, Form, replace_file

MAX_BYTES = 32 << 20
"""A profile of a model with hundreds of unlike layers on dozens of device classes takes a few MiB."""

WIDTH = 150

_FORMAT = FileFormat(
    adapter=TypeAdapter(Cluster),
    noun="a cluster",
    version=SCHEMA_VERSION,
    remedy="see docs/cluster-files.md",
    max_bytes=MAX_BYTES,
)


def load_cluster(path: str | Path) -> Cluster:
    """Read a cluster file, refusing anything that is not exactly in the form of `Cluster`.

    Raises:
        TrimtabError: naming the file, the place inside it, and the remedy.
    """
    return _FORMAT.load(path, form_of(Path(path)))


def parse_cluster(text: str, *, source: str, form: Form = "yaml") -> Cluster:
    """Read a cluster from text; `source` is what errors call it."""
    return _FORMAT.parse(text, source=source, form=form)


def cluster_tree(cluster: Cluster) -> dict[str, Any]:
    """What a cluster file holds."""
    tree: dict[str, Any] = _FORMAT.adapter.dump_python(cluster, mode="json", exclude_defaults=True)
    return tree


def save_cluster(cluster: Cluster, path: str | Path) -> None:
    """Write a cluster file that `load_cluster` reads back as an equal cluster."""
    form = form_of(Path(path))
    tree = cluster_tree(cluster)
    if form == "json":
        replace_file(path, _pretty(tree) + "\n")
    else:
        replace_file(path, yaml.safe_dump(tree, sort_keys=False, default_flow_style=None, width=WIDTH))


def _pretty(tree: Any, indent: str = "") -> str:
    """JSON in which everything that fits on a line is on one."""
    line = json.dumps(tree)
    if len(indent) + len(line) <= WIDTH or not isinstance(tree, (dict, list)):
        return line
    inner = indent + "  "
    if isinstance(tree, dict):
        parts = [f"{inner}{json.dumps(key)}: {_pretty(value, inner)}" for key, value in tree.items()]
        return "{\n" + ",\n".join(parts) + f"\n{indent}}}"
    return "[\n" + ",\n".join(inner + _pretty(value, inner) for value in tree) + f"\n{indent}]"


def form_of(path: Path) -> Form:
    """The form of a cluster file, by its name; raises for other names."""
    suffix = path.suffix.lower()
    if suffix == ".json":
        return "json"
    if suffix in (".yaml", ".yml"):
        return "yaml"
    raise TrimtabError(f"{path}: a cluster file ends in .yaml, .yml or .json; rename it")
