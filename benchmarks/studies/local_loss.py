"""GPT-2 small on four workers: the loss of plain DDP, of compressed gradients, and of local steps, in resumable pieces.

Trains on four parts of one GPU, over NCCL's sockets, from where the state in FOLDER is, for at most so many seconds;
FOLDER/METHOD.json has the losses on held-out text so far. Call it until `done` is true. Plain DDP is trained by one
process on the batches of all four workers: the mean of four equal batches' mean gradients is that of the whole batch.
The others are four processes with the verbs of the product. The rounds of `local` are the longest that the planner
allows four workers by default; those of `auto` are chosen, and follow the workers' agreement, so it is trained in one
piece. `summary FOLDER` joins the methods' files into one.

    PYTHONPATH=src:. python3 -m benchmarks.studies.local_loss ddp FOLDER --seconds 240
    PYTHONPATH=src:. python3 -m benchmarks.studies.local_loss default FOLDER --seconds 240
    PYTHONPATH=src:. python3 -m benchmarks.studies.local_loss local FOLDER --seconds 240
    PYTHONPATH=src:. python3 -m benchmarks.studies.local_loss summary FOLDER
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from math import cos, pi
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import trimtab
from trimtab.bench.harness import Progress, environment
from trimtab.bench.ranks import hosts, run_on_cluster, slices
from trimtab.control.rank_values import gather_numbers
from trimtab.models import tasks
from trimtab.planning.local_steps import MAX_PENALTY, longest_round, penalty

METHODS = ("ddp", "default", "local", "auto")
WORKERS, LR, WARM_UP, EVALUATE = 4, 3e-4, 100, 100
COMMAND = "python3 -m benchmarks.studies.local_loss {} FOLDER"
HELD_OUT = 128
"""Sequences whose loss is measured."""


def prepared(method: str, model: nn.Module, every: int) -> nn.Module:
    ddp = DistributedDataParallel(model)
    if method == "default":
        trimtab.compress(ddp, trimtab.Adaptive())
    elif method == "local":
        trimtab.local_steps(ddp, every=every)
    elif method == "auto":
        trimtab.local_steps(ddp)
    return ddp


def on_rank(spec: Mapping[str, Any], report: Progress) -> dict[str, Any]:
    """Train until the steps or the seconds are over."""
    began = time.monotonic()
    device = torch.device(spec["device"])
    if device.type == "cuda":
        task = tasks.gpt2(spec["samples"], device, length=spec["length"], held_out=HELD_OUT)
    else:  # tries the script where there is no GPU
        task = tasks.gpt(width=32, layers=1, heads=2, context=32, samples=spec["samples"])
    saved = Path(spec["folder"], f"{spec['method']}-{dist.get_rank()}.pt")
    parts = WORKERS // dist.get_world_size()
    state = torch.load(saved, map_location=device, weights_only=True) if saved.exists() else None
    model = prepared(spec["method"], task.model, spec["every"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1, betas=(0.9, 0.95))
    first, curve = 0, []
    if state is not None:
        # Not before: wrapping gives all workers the same weights, and theirs differ.
        task.model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first, curve = state["step"], state["curve"]
        if spec["method"] != "ddp":
            trimtab.load_state_dict(model, state["trimtab"])
    half = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
    step, losses = first, []
    for step in range(first + 1, spec["steps"] + 1):
        rate = min(1.0, step / WARM_UP) * (0.1 + 0.45 * (1 + cos(pi * step / spec["steps"])))
        for group in optimizer.param_groups:
            group["lr"] = LR * rate
        with half:
            batches = (task.batch(step=step, rank=parts * dist.get_rank() + part) for part in range(parts))
            loss = model(*map(torch.cat, zip(*batches, strict=True)))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        report(step, spec["steps"])
        if step % EVALUATE == 0 or step == spec["steps"]:
            with trimtab.agreed_weights(model), half:
                model.eval()
                held_out = task.held_out_loss(task.model)
                model.train()
            curve.append({"step": step, "held_out": held_out, "train": float(torch.stack(losses).mean())})
            losses = []
            if dist.get_rank() == 0:
                print(
                    spec["method"],
                    curve[-1],
                    f"{time.monotonic() - began:.0f} s",
                    file=sys.stderr,
                    flush=True,
                )
                keep(spec, {"step": step, "curve": curve}, [*spec["before"], time.monotonic() - began])
            late = max(row[0] for row in gather_numbers([time.monotonic() - began], None)) > spec["seconds"]
            if late:
                break
    if step < spec["steps"]:
        # Before the weights, so that an exchange under way has ended when they are saved.
        own = {} if spec["method"] == "ddp" else trimtab.state_dict(model)
        torch.save(
            {
                "model": task.model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "trimtab": own,
                "step": step,
                "curve": curve,
            },
            saved,
        )
    return {
        "step": step,
        "curve": curve,
        "seconds": time.monotonic() - began,
        "explain": trimtab.explain(model),
    }


def keep(spec: Mapping[str, Any], result: Mapping[str, Any], seconds: Sequence[float]) -> dict[str, Any]:
    """Write what is known of a method so far."""
    whole = {
        "environment": {**environment(), "command": COMMAND.format(spec["method"])},
        "method": spec["method"],
        "workers": WORKERS,
        "processes": 1 if spec["method"] == "ddp" else WORKERS,
        **{key: spec[key] for key in ("samples", "length")},
        "every": spec["every"] if spec["method"] == "local" else None,
        "done": result["step"] >= spec["steps"],
        **result,
        "seconds": list(seconds),
    }
    Path(spec["folder"], f"{spec['method']}.json").write_text(json.dumps(whole, indent=1) + "\n")
    return whole


def summary(folder: Path) -> dict[str, Any]:
    """The methods that were trained, side by side; gaps are relative to DDP at equal steps."""
    parts = {name: folder / f"{name}.json" for name in METHODS}
    found = {name: json.loads(file.read_text()) for name, file in parts.items() if file.exists()}
    curves = {name: {row["step"]: row["held_out"] for row in one["curve"]} for name, one in found.items()}
    rows = []
    for name, one in found.items():
        last = max(curves[name].keys() & curves["ddp"].keys())
        rows.append(
            {
                "method": name,
                "step": last,
                "held_out": curves[name][last],
                "gap": curves[name][last] / curves["ddp"][last] - 1,
                "explain": one.get("explain"),
            }
        )
    every = next((one["every"] for one in found.values() if one["every"]), None)
    return {
        "bench": "local_loss",
        "summary": {
            **{f"{row['method']}_steps": row["step"] for row in rows},
            **{f"{row['method']}_gap": row["gap"] for row in rows if row["method"] != "ddp"},
            "expected_gap": None if every is None else penalty(WORKERS, every),
            "every": every,
        },
        "rows": rows,
        "methods": {
            name: {key: value for key, value in one.items() if key != "environment"}
            for name, one in found.items()
        },
        "environment": {**found["ddp"]["environment"], "command": COMMAND.format("summary")},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("method", choices=(*METHODS, "summary"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=8, help="of a worker in a step")
    parser.add_argument("--length", type=int, default=257, help="bytes of a sequence")
    parser.add_argument(
        "--every", type=int, default=longest_round(WORKERS, MAX_PENALTY), help="steps of a round"
    )
    parser.add_argument("--seconds", type=float, default=240.0)
    args = parser.parse_args()
    if args.method == "summary":
        print(json.dumps(summary(args.folder), indent=1))
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    file = args.folder / f"{args.method}.json"
    before = json.loads(file.read_text())["seconds"] if file.exists() else []
    spec = {**vars(args), "folder": str(args.folder.absolute()), "before": before}
    ranks = 1 if args.method == "ddp" else WORKERS
    cluster = slices(ranks) if args.device == "cuda" else hosts((1.0,) * ranks)
    result = run_on_cluster(cluster, on_rank, spec)
    whole = keep(spec, result, [*before, result["seconds"]])
    print(json.dumps({key: whole[key] for key in ("method", "step", "done", "seconds")}))
    print(json.dumps(result["curve"]))


if __name__ == "__main__":
    from benchmarks.studies import local_loss  # by this name the ranks find `on_rank`

    local_loss.main()
