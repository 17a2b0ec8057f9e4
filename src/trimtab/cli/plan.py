"""The command line of `trimtab plan`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from trimtab.api.plan import plan as make
from trimtab.cli.terminal import print_table, progress_bar
from trimtab.cluster import load_cluster
from trimtab.errors import TrimtabError
from trimtab.planning.plan_file import save_plan

if TYPE_CHECKING:
    from pathlib import Path

    from trimtab.planning.make import Bits
    from trimtab.planning.plan import Plan


def command(
    cluster: Path, model: str, out: Path, *, bits: str, batch: str, as_json: bool, **asked: Any
) -> None:
    """Plan, write the file, and say what it holds."""
    if out.suffix.lower() != ".json":
        raise TrimtabError(f"{out}: a plan file ends in .json; name it so")
    if batch not in ("free", "fixed"):
        raise TrimtabError(f"plan: --batch is free or fixed; got {batch!r}")
    chosen = parse_bits(bits)
    given = load_cluster(cluster)
    try:
        with progress_bar("planning") as progress:
            found = make(model, given, bits=chosen, batch=batch, progress=progress, **asked)  # type: ignore[arg-type]
    except TrimtabError as error:
        raise TrimtabError(f"{cluster}: {error}") from None
    save_plan(found, out)
    if as_json:
        print(json.dumps(tree(found, out), indent=2))
        return
    shown = rows(found)
    for column in ("device", "memory_gib"):  # only where they tell something
        if all(row[column] in (None, row["role"]) for row in shown):
            shown = [{key: value for key, value in row.items() if key != column} for row in shown]
    print_table(f"{out}: {found.batch} shares, {model}", shown)
    print_table("predicted", [summary(found)])
    for reason in found.reasons:
        print(f"- {reason}")


def parse_bits(text: str) -> Bits:
    """``4``, ``none``, ``adaptive`` or ``auto``."""
    if text == "none":
        return None
    if text == "adaptive":
        return "adaptive"
    if text == "auto":
        return "auto"
    if text.isdigit() and 1 <= int(text) <= 8:
        return int(text)
    raise TrimtabError(f"plan: --bits is 1 to 8, none, adaptive or auto; got {text!r}")


def rows(plan: Plan) -> list[dict[str, Any]]:
    """A line for each role."""
    counts: dict[str, int] = {}
    for name, count in plan.ranks:
        counts[name] = counts.get(name, 0) + count
    return [
        {
            "role": name,
            "device": role.device,
            "ranks": counts[name],
            "samples": role.samples,
            "lowered": len(role.precisions),
            "of": len(role.choices),
            "to": ", ".join(sorted(set(role.precisions.values()))) or None,
            "compute_ms": role.compute_s * 1e3,
            "peak_gib": role.peak_bytes / 2**30,
            "memory_gib": None if role.memory_bytes is None else role.memory_bytes / 2**30,
        }
        for name, role in plan.roles.items()
    ]


def summary(plan: Plan) -> dict[str, Any]:
    """What the plan is expected to bring."""
    predicted = plan.predicted
    return {
        "step_ms": predicted.step_s * 1e3,
        "plain_ddp_ms": predicted.plain_step_s * 1e3,
        "gain": predicted.plain_step_s / predicted.step_s if predicted.step_s else 1.0,
        "samples_per_s": plan.batch_size / predicted.step_s if predicted.step_s else None,
        "damage": predicted.damage,
        "uniform_low_damage": predicted.uniform_damage,
        "bits": plan.bits,
    }


def tree(plan: Plan, out: Path) -> dict[str, Any]:
    """A plan for JSON; the whole of it is in its file."""
    return {
        "out": str(out),
        "hash": plan.hash,
        "model": plan.model,
        "batch": plan.batch,
        **summary(plan),
        "roles": rows(plan),
        "ranks": plan.ranks,
        "reasons": plan.reasons,
    }
