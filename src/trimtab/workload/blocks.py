"""Repeated blocks: modules whose operators are identical, so that a decision for one applies to all."""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.workload.operator import Operator
from trimtab.workload.workload import RepeatedBlock


def repeated_blocks(operators: Sequence[Operator]) -> tuple[RepeatedBlock, ...]:
    """Identical runs of operators in one list of modules (``h.0``, ``h.1``...), outermost lists first.

    Identical means the same operators on the same shapes with the same edges among themselves. The modules of one
    list may be of several kinds (the first of a ResNet's stage differs): each kind with two or more runs is one
    result.
    """
    runs: dict[str, list[tuple[str, int, int]]] = {}
    for module, start, end in _runs(operators):
        runs.setdefault(module.rpartition(".")[0], []).append((module, start, end))
    blocks: list[RepeatedBlock] = []
    taken: set[int] = set()
    for _, members in sorted(runs.items(), key=lambda item: (item[0].count("."), item[0])):
        sorts: dict[tuple[object, ...], list[tuple[str, int, int]]] = {}
        for module, start, end in members:
            if start not in taken:
                sorts.setdefault(_signature(operators, module, start, end), []).append((module, start, end))
        for alike in sorts.values():
            if len(alike) < 2:
                continue
            blocks.append(
                RepeatedBlock(
                    starts=tuple(start for _, start, _ in alike),
                    length=alike[0][2] - alike[0][1],
                    modules=tuple(module for module, _, _ in alike),
                )
            )
            taken.update(i for _, start, end in alike for i in range(start, end))
    return tuple(sorted(blocks, key=lambda block: block.starts))


def _runs(operators: Sequence[Operator]) -> list[tuple[str, int, int]]:
    """Every contiguous run of operators inside one numbered module."""
    blocks: list[tuple[str, int, int]] = []
    open_: dict[str, int] = {}
    for index, operator in enumerate(operators):
        inside = set(_numbered(operator.module))
        for module in [m for m in open_ if m not in inside]:
            blocks.append((module, open_.pop(module), index))
        for module in inside:
            open_.setdefault(module, index)
    blocks += [(module, start, len(operators)) for module, start in open_.items()]
    return sorted(blocks, key=lambda run: run[1])


def _numbered(module: str) -> list[str]:
    """The numbered modules that a module is in: ``a.0.b.1.c`` is in ``a.0`` and ``a.0.b.1``."""
    parts = module.split(".")
    return [".".join(parts[: i + 1]) for i, part in enumerate(parts) if part.isdigit()]


def _signature(operators: Sequence[Operator], module: str, start: int, end: int) -> tuple[object, ...]:
    """What a run does, without its own name and position."""
    return tuple(
        (
            operator.kind,
            operator.target,
            operator.module.removeprefix(module),
            None if operator.setting is None else operator.setting.removeprefix(module),
            tuple(i - start if i >= start else "before" for i in operator.inputs),
            operator.input_tensors,
            operator.outputs,
            operator.parameter_tensors,
            repr(sorted(operator.arguments.items())),
            tuple((s.role, s.tensor) for s in operator.saved),
        )
        for operator in operators[start:end]
    )
