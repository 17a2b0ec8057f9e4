"""Write docs/reference/*.md, one page per public module: python tools/write_reference.py"""

from __future__ import annotations

import importlib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = {
    "trimtab": "The verbs. They act in place and return the model.",
    "trimtab.backend": 'The backend `"trimtab"` of `torch.distributed`. Guide: [FSDP2 and backend](../doors.md).',
    "trimtab.codec": "How gradients are encoded. Guide: [compress gradients](../compression.md).",
    "trimtab.collectives": "Compressed reductions on any tensor. Guide: [several ranks per host](../hierarchy.md).",
    "trimtab.precision": "Precisions of operators. Guide: [lower precision](../precision.md).",
    "trimtab.sharding": "Tensor parallelism by units. Guide: [tensor parallelism](../tensor-parallel.md).",
    "trimtab.control": "What acts during training. Guides: [resizing](../resizing.md), [balancing](../balancing.md).",
    "trimtab.cluster": "What the hardware is. Guide: [cluster files](../cluster-files.md).",
    "trimtab.workload": "What a step asks for. Concept: [workloads](../workload.md).",
    "trimtab.measure": "Capture and damage. Concepts: [workloads](../workload.md), [damage](../indicator.md).",
    "trimtab.predict": "Time and memory of a step. Guide: [predict a step](../predict.md).",
    "trimtab.planning": "Decisions, and the plan file. Guide: [plan a job](../planning.md).",
    "trimtab.emulate": "Uneven clusters on one machine. Guide: [emulate a cluster](../emulate.md).",
}


def page(module: str) -> str:
    """The page of a module: a reference to each public name, whose docstring the site shows."""
    names = [name for name in importlib.import_module(module).__all__ if not name.startswith("__")]
    entries = "".join(f"\n::: {module}.{name}\n" for name in sorted(names))
    return f"# {module}\n\n{PAGES[module]}\n{entries}"


def path(module: str) -> Path:
    return ROOT / "docs" / "reference" / f"{module.rpartition('.')[2]}.md"


if __name__ == "__main__":
    for module in PAGES:
        path(module).write_text(page(module))
