"""Which of a slow rank's units should it leave out, and how should their gradients be filled in?

    PYTHONPATH=src:. python -m benchmarks.studies.resizing [--setting 0] [--json FILE]
    PYTHONPATH=src:. python -m benchmarks.studies.resizing --device cuda --minutes 5 --seeds 8 [--json FILE]

The setting of the ZERO-resizing paper, made small: ViTs on images, eight tensor-parallel ranks, the part gamma of one
rank's units left out of every training step, for many epochs; the slow rank is always the same, or another one in
each epoch. Leaving units out is a mask over units and changes no collective, so one process computes all eight ranks'
units, and no process group is needed to ask about accuracy. All methods leave out the same number, so they take the
same time; what is chosen comes from the product's own functions (`trimtab.planning.tensor.resizing`). Every method is
compared seed by seed on test images, with everything computed.

Rows: `nothing` leaves nothing out, and `nothing (another order)` shows what is chance. `nothing, half the epochs` is
what a rank at half speed has done in the time in which one that leaves half out trains all epochs. `most changed` is
the opposite of `change`: if it is no worse than `random`, the score says nothing. The canary leaves 0.9 of all ranks'
units out and must show. A GPU trains larger ViTs on more images, all runs of a setting at once, for as many epochs as
fit into `--minutes`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from benchmarks.studies.resizing_runs import Method, Run, Study
from benchmarks.studies.stacked_vit import Size, images

from trimtab.bench.harness import environment

SIZE = Size(width=32, layers=2, heads=32, head_dim=2, hidden=128, image=12, train=2000, epochs=12, batch=40)
CUDA_SIZE = Size(
    width=64, layers=4, heads=32, head_dim=4, hidden=256, image=16, train=8000, epochs=20, batch=64, test=4000
)
MOST_EPOCHS = 60
SETTINGS = [(gamma, moving) for gamma in (0.5, 0.25) for moving in (False, True)]
METHODS: dict[str, Method] = {
    "nothing": Method(off=True),
    "nothing (another order)": Method(off=True, order=1),
    "random": Method(),
    "change": Method(score="change"),
    "gradient": Method(score="gradient"),
    "change and gradient": Method(score="both"),
    "change, by layer": Method(score="change", per_layer=True),
    "activation": Method(score="activation"),
    "most changed": Method(score="most changed"),
    "random, average": Method(impute="average"),
    "random, last gradient": Method(impute="same"),
    "change, average": Method(score="change", impute="average"),
    "change, last gradient": Method(score="change", impute="same"),
    "columns, change": Method(score="change", form="column"),
    "canary": Method(canary=True),
}


def rows_of(
    setting: Mapping[str, Any], runs: Sequence[tuple[str, int, float, float]]
) -> list[dict[str, Any]]:
    """For each method: mean accuracy and loss, and its differences to `nothing` and to `random`, seed by seed."""
    found: dict[str, dict[int, tuple[float, float]]] = {}
    for method, seed, accuracy, loss in runs:
        found.setdefault(method, {})[seed] = (accuracy, loss)
    rows = []
    for method, by_seed in found.items():
        row: dict[str, Any] = {**setting, "method": method, "seeds": len(by_seed)}
        for place, what in enumerate(("accuracy", "loss")):
            row[what] = mean(values[place] for values in by_seed.values())
            for other in ("nothing", "random"):
                if other in found and other != method:
                    gaps = [values[place] - found[other][seed][place] for seed, values in by_seed.items()]
                    row[f"{what}_over_{other}"] = mean(gaps)
                    row[f"{what}_over_{other}_error"] = (
                        stdev(gaps) / sqrt(len(gaps)) if len(gaps) > 1 else 0.0
                    )
        rows.append(row)
    return rows


def study(
    size: Size,
    device: torch.device,
    seeds: int,
    settings: Sequence[tuple[float, bool]],
    report: Callable[[list[dict[str, Any]]], None],
    methods: Mapping[str, Method] = METHODS,
) -> list[dict[str, Any]]:
    """All rows; `report` is called with those of each setting."""
    data, test = images(size.train, size, 10), images(size.test, size, 11)
    rows: list[dict[str, Any]] = []

    def train(
        setting: Mapping[str, Any], which: Mapping[str, Method], of: Size, gamma: float, moving: bool
    ) -> list[tuple[str, int, float, float]]:
        began = time.monotonic()
        runs = [
            (name, Run(method=method, seed=seed)) for name, method in which.items() for seed in range(seeds)
        ]
        own = Study(of, [run for _, run in runs], gamma, moving, device)
        setting = {**setting, "epochs": of.epochs}
        own.train(
            data,
            lambda epoch, epochs: print(
                f"{dict(setting)} epoch {epoch}/{epochs} {time.monotonic() - began:.0f} s", flush=True
            ),
        )
        accuracies, losses = own.test(test)
        return [
            (name, run.seed, accuracy, loss)
            for (name, run), accuracy, loss in zip(runs, accuracies, losses, strict=True)
        ]

    for index, (gamma, moving) in enumerate(settings):
        setting = {"gamma": gamma, "straggler": "moving" if moving else "one rank", "epochs": size.epochs}
        results = train(setting, methods, size, gamma, moving)
        if index == 0:
            half = replace(size, epochs=size.epochs // 2)
            results += train(
                setting,
                {"nothing, half the epochs": Method(off=True)},
                half,
                gamma,
                moving,
            )
        rows += rows_of(setting, results)
        report(rows)
    return rows


def epochs_within(
    seconds: float,
    size: Size,
    device: torch.device,
    seeds: int,
    settings: Sequence[tuple[float, bool]],
    methods: Mapping[str, Method] = METHODS,
) -> int:
    """How many epochs of each setting fit into that time, from some steps of the first; an even number."""
    runs = [Run(method=method, seed=seed) for method in methods.values() for seed in range(seeds)]
    gamma, moving = settings[0]
    for _ in range(2):  # the first warms up
        short = replace(size, train=48 * size.batch, epochs=1)
        own = Study(short, runs, gamma, moving, device)
        data = images(short.train, short, 10)
        began = time.monotonic()
        own.train(data, lambda epoch, epochs: None)
        own.test(data)  # waits for the device
        step = (time.monotonic() - began) / short.steps_per_epoch
    # A tenth for the row of half the epochs, for the tests, and for what else goes on.
    epochs = 0.9 * seconds / (step * size.steps_per_epoch * len(settings))
    print(f"{1000 * step:.1f} ms per step of {len(runs)} runs: {epochs:.1f} epochs fit", flush=True)
    return 2 * max(1, min(MOST_EPOCHS, int(epochs)) // 2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--setting", type=int, choices=range(len(SETTINGS)), help="only this one")
    parser.add_argument("--methods", help="only these, separated by semicolons")
    parser.add_argument("--minutes", type=float, help="as many epochs as fit; otherwise a fixed number")
    parser.add_argument("--json", type=Path, help="rows are added to those that are there")
    args = parser.parse_args()
    device = torch.device(args.device)
    methods = METHODS if args.methods is None else {name: METHODS[name] for name in args.methods.split(";")}
    torch.set_float32_matmul_precision("high")
    size = CUDA_SIZE if device.type == "cuda" else SIZE
    settings = SETTINGS if args.setting is None else [SETTINGS[args.setting]]
    if args.minutes is not None:
        size = replace(
            size, epochs=epochs_within(60 * args.minutes, size, device, args.seeds, settings, methods)
        )
    before = json.loads(args.json.read_text())["rows"] if args.json is not None and args.json.exists() else []

    def save(rows: list[dict[str, Any]]) -> None:
        if args.json is not None:
            result = {
                "study": "resizing",
                "size": asdict(size),
                "rows": [*before, *rows],
                "environment": environment(),
            }
            args.json.write_text(json.dumps(result, indent=2) + "\n")

    for row in study(size, device, args.seeds, settings, save, methods):
        print(
            f"{row['gamma']:<5g} {row['straggler']:9} {row['method']:26} {row['accuracy']:.4f}"
            f" {row.get('accuracy_over_nothing', 0):+.4f} ± {row.get('accuracy_over_nothing_error', 0):.4f}"
            f" {row.get('accuracy_over_random', 0):+.4f} ± {row.get('accuracy_over_random_error', 0):.4f}"
            f" loss {row['loss']:.4f} {row.get('loss_over_random', 0):+.4f}"
            f" ± {row.get('loss_over_random_error', 0):.4f}"
        )


if __name__ == "__main__":
    main()
