"""How far off are estimates from a datasheet? Measure one part of a GPU, estimate unlike parts, measure those too.

    python benchmarks/studies/catalog_error.py --device cuda > catalog-error.json      # about two minutes
    python benchmarks/studies/catalog_error.py --device cpu                            # a dry run on throttled hosts

A part (NVIDIA's MPS) is taken for another card whose datasheet says this many multiprocessors: its printed arithmetic
rates are the whole card's times its part of the multiprocessors. All parts share the card's memory, so `bandwidth` is
printed both as the whole card's and in proportion. Every part is measured alone.

Rows have `model`, `measured_on`, `estimated`, `bandwidth`, `how` ("datasheets": the measured times by the ratio of the
printed rates, as `trimtab simulate --add` estimates from a GPU of the catalog; "derived": by the ratio of rates derived
from the times, as it does from other devices), `step_ms`, `measured_ms` and `error`, the estimate over the measurement
minus one. Rows with the same part on both sides show how well a part agrees with its own datasheet.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import sys
import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from pydantic import TypeAdapter
from torch import nn

from trimtab.bench.ranks import hosts
from trimtab.cluster.catalog import KnownDevice, lookup
from trimtab.cluster.profile import DeviceProfile
from trimtab.emulate import Emulation
from trimtab.measure.device import DeviceProbe, Task, alone, cache_of, called
from trimtab.measure.products import refuse_wrong_products
from trimtab.models.data import filled
from trimtab.models.spec import ModelSpec, load_model
from trimtab.predict.operators.costs import key_of
from trimtab.predict.operators.estimate import REACHED, REACHED_BANDWIDTH, rates, scaled_profile

SPEEDS = {"cuda": ((1.0,), (1.0, 0.5, 0.25)), "cpu": ((1.0, 0.5),)}
"""Of the emulated clusters. On a GPU the second one has about 1/2, 1/4 and 1/8 of it."""

BATCHES = {"cuda": (8, 16), "cpu": (2, 4)}
SECONDS = 25.0
"""For the steps of a model on a part."""

PROFILES = TypeAdapter(dict[str, DeviceProfile])


class SmallConv(nn.Module):
    """Convolutions for a dry run."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 16, 32, 32)
        self.layers = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1, stride=2) for a, b in pairwise(widths))
        self.head = nn.Linear(32, 10)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            images = F.relu(layer(images))
        return F.cross_entropy(self.head(images.mean((2, 3))), labels)


def specs(device: torch.device) -> list[ModelSpec]:
    """A GPT and a convolutional network."""
    samples = min(BATCHES[device.type])
    if device.type == "cuda":
        named = [load_model(name, device, samples=samples) for name in ("gpt2", "resnet50")]
        return [replace(spec, batch=filled(spec, 0)) for spec in named]
    gpt = load_model("gpt", device, samples=samples)
    batch = torch.randn(samples, 3, 32, 32), torch.zeros(samples, dtype=torch.int64)
    return [
        replace(gpt, batch=filled(gpt, 0)),
        ModelSpec(name="conv", model=SmallConv(), batch=batch),
    ]


def measure(folder: Path, kind: str) -> None:
    """What each rank runs: its profile of each model, one rank after the other."""
    device = torch.device(kind)
    torch.set_num_threads(1)
    if kind == "cuda":
        torch.cuda.set_device(0)
    refuse_wrong_products(device)
    alone()
    result: dict[str, Any] = {
        "called": called(device),
        "units": torch.cuda.get_device_properties(0).multi_processor_count if kind == "cuda" else None,
        "models": {},
    }
    with (folder / "turn").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        for spec in specs(device):
            half = "bf16" if kind == "cuda" else None
            task = Task(
                spec=spec, batches=BATCHES[kind], precisions=(), bits=(), autocast=half, seconds=SECONDS
            )
            probe = DeviceProbe(task, device, cache_of(device))
            profile, left = probe.run(lambda _done, _total: None)
            sizes = profile.batches[probe.workload.model]
            samples = max(sizes)
            at = probe.workload.at_batch(samples)
            result["models"][spec.name] = {
                "profile": PROFILES.dump_python({"own": profile}, mode="json")["own"],
                "keys": [str(key_of(operator)) for operator in at.operators],
                "elements": sum(p.tensor.numel for p in at.parameters if p.trainable),
                "samples": samples,
                "unfinished": len(left),
            }
            if kind == "cuda":
                torch.cuda.empty_cache()
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def step_s(profile: DeviceProfile, keys: list[str], elements: int) -> float:
    """A step of one rank, without communication."""
    assert profile.optimiser is not None
    times = [profile.operators[key] for key in keys]
    return sum(t.forward_s + t.backward_s for t in times) + profile.optimiser.seconds(elements)


def printed(whole: KnownDevice, part: float, bandwidth: str) -> KnownDevice:
    """The datasheet of a part."""
    return replace(
        whole,
        tflops={name: rate * part for name, rate in whole.tflops.items()},
        gb_per_s=whole.gb_per_s * (1.0 if bandwidth == "whole" else part),
    )


def datasheet(kind: str, largest: dict[str, Any], model: str) -> KnownDevice:
    """The card's; in a dry run one that agrees with what the fastest host reached."""
    if kind == "cuda":
        card = lookup(largest["called"])
        if card is None:
            raise SystemExit(f"{largest['called']} is not in the catalog")
        return card
    profile = TypeAdapter(DeviceProfile).validate_json(json.dumps(largest["models"][model]["profile"]))
    assert profile.optimiser is not None
    return KnownDevice(
        model="this CPU",
        kind="cpu",
        pattern="",
        tflops={name: rate / REACHED / 1e12 for name, rate in rates(profile).items()},
        gb_per_s=28 / profile.optimiser.a / REACHED_BANDWIDTH / 1e9,
    )


def rows_of(kind: str, parts: list[tuple[float, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Every part estimated from every part."""
    rows = []
    largest = max(parts, key=lambda one: one[0])[1]
    for model in largest["models"]:
        whole = datasheet(kind, largest, model)
        for part, result in parts:
            own = result["models"][model]
            profile = TypeAdapter(DeviceProfile).validate_json(json.dumps(own["profile"]))
            for other, theirs in parts:
                target = theirs["models"][model]
                actual = TypeAdapter(DeviceProfile).validate_json(json.dumps(target["profile"]))
                if own["samples"] != target["samples"]:
                    continue  # one of them had too little memory
                measured = step_s(actual, target["keys"], target["elements"])
                for bandwidth in ("whole", "in proportion"):
                    sheets = [printed(whole, size, bandwidth) for size in (part, other)]
                    estimates = {
                        "derived": scaled_profile("measured", profile, sheets[1]),
                        "datasheets": scaled_profile("measured", profile, sheets[1], sheets[0]),
                    }
                    for how, estimate in estimates.items():
                        predicted = step_s(estimate, own["keys"], own["elements"])
                        rows.append(
                            {
                                "model": model,
                                "samples": own["samples"],
                                "measured_on": round(part, 3),
                                "estimated": round(other, 3),
                                "bandwidth": bandwidth,
                                "how": how,
                                "step_ms": predicted * 1e3,
                                "measured_ms": measured * 1e3,
                                "error": predicted / measured - 1,
                                "unfinished": own["unfinished"] + target["unfinished"],
                            }
                        )
    return rows


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean and worst error by model and method, of unlike parts."""
    found = []
    for key in dict.fromkeys((row["model"], row["how"], row["bandwidth"]) for row in rows):
        errors = [
            abs(row["error"])
            for row in rows
            if (row["model"], row["how"], row["bandwidth"]) == key and row["measured_on"] != row["estimated"]
        ]
        if errors:
            names = ("model", "how", "bandwidth")
            found.append(
                dict(zip(names, key, strict=True)) | {"mean_error": mean(errors), "worst_error": max(errors)}
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        measure(options.rank, options.device)
        return
    parts: list[tuple[float, dict[str, Any]]] = []
    for speeds in SPEEDS[options.device]:
        with tempfile.TemporaryDirectory(prefix="trimtab-catalog-") as folder:
            with Emulation(hosts(speeds, options.device)) as emulation:
                arguments = [str(Path(__file__).resolve()), "--rank", folder, "--device", options.device]
                outcome = emulation.run(arguments, env={"TRIMTAB_LOG": "warning"}, timeout=170)
            if outcome.failure is not None:
                raise SystemExit(f"catalog_error: {outcome.failure}")
            for rank, speed in enumerate(speeds):
                result = json.loads(Path(folder, f"rank-{rank}.json").read_text())
                parts.append((float(result["units"] or speed), result))
    most = max(units for units, _ in parts)
    parts = [(units / most, result) for units, result in parts]
    rows = rows_of(options.device, parts)
    json.dump(
        {
            "device": parts[0][1]["called"],
            "parts": [round(part, 3) for part, _ in parts],
            "summary": summary(rows),
            "rows": rows,
        },
        sys.stdout,
        indent=2,
    )
    print()


if __name__ == "__main__":
    main()
