"""Reading and writing cluster files: one strict form, YAML or JSON by extension."""

from __future__ import annotations

import json
from pathlib import Path

import yaml
from pydantic import TypeAdapter

from trimtab.cluster.cluster import SCHEMA_VERSION, Cluster
from trimtab.errors import TrimtabError
from trimtab.strict_files import FileFormat, Form, replace_file

_FORMAT = FileFormat(
    adapter=TypeAdapter(Cluster),
    noun="a cluster",
    version=SCHEMA_VERSION,
    remedy="see docs/cluster-files.md",
    max_bytes=4 << 20,
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


def save_cluster(cluster: Cluster, path: str | Path) -> None:
    """Write a cluster file that `load_cluster` reads back as an equal cluster."""
    form = form_of(Path(path))
    tree = _FORMAT.adapter.dump_python(cluster, mode="json", exclude_none=True)
    text = json.dumps(tree, indent=2) + "\n" if form == "json" else yaml.safe_dump(tree, sort_keys=False)
    replace_file(path, text)


def form_of(path: Path) -> Form:
    """The form of a cluster file, by its name; raises for other names."""
    suffix = path.suffix.lower()
    if suffix == ".json":
        return "json"
    if suffix in (".yaml", ".yml"):
        return "yaml"
    raise TrimtabError(f"{path}: a cluster file ends in .yaml, .yml or .json; rename it")
