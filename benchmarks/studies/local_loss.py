"""GPT-2 small on four workers: the loss of plain DDP, of compressed gradients, and of local steps, in resumable pieces.

Trains on four parts of one GPU, over NCCL's sockets, from where the state in FOLDER is, for at most so many seconds;
FOLDER/METHOD.json has the losses on held-out text so far. Call it until `done` is true. Plain DDP is trained by one
process on the batches of all four workers: the mean of four equal batches' mean gradients is that of the whole batch.

    PYTHONPATH=src:. python3 -m benchmarks.studies.local_loss ddp FOLDER --seconds 240
    PYTHONPATH=src:. python3 -m benchmarks.studies.local_loss default FOLDER --seconds 240
    PYTHONPATH=src:. python3 -m benchmarks.studies.local_loss local FOLDER --seconds 240
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
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

METHODS = ("ddp", "default", "local")
WORKERS, LR, WARM_UP, EVALUATE = 4, 3e-4, 100, 100


def prepared(method: str, model: nn.Module, every: int) -> nn.Module:
    ddp = DistributedDataParallel(model)
    if method == "default":
        trimtab.compress(ddp, trimtab.Adaptive())
    elif method == "local":
        trimtab.local_steps(ddp, every=every)
    return ddp


def on_rank(spec: Mapping[str, Any], report: Progress) -> dict[str, Any]:
    """Train until the steps or the seconds are over."""
    began = time.monotonic()
    device = torch.device(spec["device"])
    if device.type == "cuda":
        task = tasks.gpt2(spec["samples"], device)
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
    step, losses = first, []
    for step in range(first + 1, spec["steps"] + 1):
        rate = min(1.0, step / WARM_UP) * (0.1 + 0.45 * (1 + cos(pi * step / spec["steps"])))
        for group in optimizer.param_groups:
            group["lr"] = LR * rate
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            batches = (task.batch(step=step, rank=parts * dist.get_rank() + part) for part in range(parts))
            loss = model(*map(torch.cat, zip(*batches, strict=True)))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        report(step, spec["steps"])
        if step % EVALUATE == 0 or step == spec["steps"]:
            with trimtab.agreed_weights(model):
                model.eval()
                held_out = task.held_out_loss(task.model)
                model.train()
            curve.append({"step": step, "held_out": held_out, "train": float(torch.stack(losses).mean())})
            losses = []
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=8, help="of a worker in a step, of 512 bytes each")
    parser.add_argument("--every", type=int, default=30, help="steps of a round")
    parser.add_argument("--seconds", type=float, default=240.0)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    spec = {**vars(args), "folder": str(args.folder.absolute())}
    ranks = 1 if args.method == "ddp" else WORKERS
    cluster = slices(ranks) if args.device == "cuda" else hosts((1.0,) * ranks)
    result = run_on_cluster(cluster, on_rank, spec)
    file = args.folder / f"{args.method}.json"
    before = json.loads(file.read_text())["seconds"] if file.exists() else []
    whole = {
        "environment": environment(),
        "method": args.method,
        "workers": WORKERS,
        "samples": args.samples,
        "every": args.every if args.method == "local" else None,
        "done": result["step"] >= args.steps,
        **result,
        "seconds": [*before, result["seconds"]],
    }
    file.write_text(json.dumps(whole, indent=1) + "\n")
    print(json.dumps({key: whole[key] for key in ("method", "step", "done", "seconds")}))
    print(json.dumps(result["curve"]))


if __name__ == "__main__":
    from benchmarks.studies import local_loss  # by this name the ranks find `on_rank`

    local_loss.main()
