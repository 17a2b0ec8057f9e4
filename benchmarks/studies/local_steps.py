"""Local steps without a network: several workers trained in one process, for choosing the outer optimizer.

Every worker is a copy of a small GPT with an AdamW of its own. Every H steps the change since the last agreement is
averaged over the workers and an outer Nesterov step is taken. Prints one JSON line for each configuration: the loss at
the agreed weights on text that is not trained on, relative to one worker with the whole batch (`ddp`).

    python -m benchmarks.studies.local_steps --device cuda --jobs 12
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import multiprocessing
import time
from typing import Any

import torch

from trimtab.models.data import text
from trimtab.models.gpt import Gpt

CONTEXT = 256
HELD_OUT = 0.05


def batch(step: int, samples: int, seed: int, device: torch.device, corpus: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(corpus) - CONTEXT - 1, (samples,), generator=generator)
    places = starts[:, None] + torch.arange(CONTEXT + 1)
    return corpus[places.to(device)].long()


def train(config: dict[str, Any]) -> dict[str, Any]:
    device = torch.device(config["device"])
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.manual_seed(config["seed"])
    whole = text().to(device)
    corpus, held = whole[: int(len(whole) * (1 - HELD_OUT))], whole[int(len(whole) * (1 - HELD_OUT)) :]
    start = Gpt(
        width=config["width"], layers=config["layers"], heads=config["width"] // 64, context=CONTEXT
    ).to(device)
    workers = config["workers"]
    models = [copy.deepcopy(start) for _ in range(workers)]
    fused = device.type == "cuda"
    optimizers = [
        torch.optim.AdamW(m.parameters(), lr=config["lr"], weight_decay=0.1, betas=(0.9, 0.95), fused=fused)
        for m in models
    ]
    steps, every, delay = config["steps"], config["every"], config["delay"]
    agreed = [p.detach().clone() for p in models[0].parameters()]
    momentum = [torch.zeros_like(p) for p in agreed]
    flight: tuple[int, list[torch.Tensor], list[list[torch.Tensor]]] | None = None
    began = time.monotonic()
    for step in range(steps):
        warm = min(1.0, (step + 1) / 100)
        rate = config["lr"] * warm * (0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))
        data = batch(step, config["batch"], config["seed"], device, corpus)
        for index, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            for group in optimizer.param_groups:
                group["lr"] = rate
            own = data[index * config["batch"] // workers : (index + 1) * config["batch"] // workers]
            with torch.autocast(device.type, torch.bfloat16, enabled=fused):
                loss = model(own)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if workers == 1 and not config["outer"]:
            continue
        if flight is not None and step == flight[0] + delay:
            take(models, agreed, momentum, flight, config)
            flight = None
        if (step + 1) % every == 0:
            sent = [[p.detach().clone() for p in m.parameters()] for m in models]
            delta = [
                a - torch.stack(own).mean(0) for a, own in zip(agreed, zip(*sent, strict=True), strict=True)
            ]
            flight = step, delta, sent
            if delay == 0:
                take(models, agreed, momentum, flight, config)
                flight = None
    final = models[0]
    if workers > 1 or config["outer"]:
        mean = [
            torch.stack([p.detach() for p in ps]).mean(0)
            for ps in zip(*(m.parameters() for m in models), strict=True)
        ]
        for p, value in zip(final.parameters(), mean, strict=True):
            p.data.copy_(value)
    losses = []
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=fused):
        for step in range(config["evaluate"]):
            losses.append(float(final(batch(step, 64, 999, device, held))))
    return {**config, "loss": sum(losses) / len(losses), "seconds": time.monotonic() - began}


def take(models: Any, agreed: Any, momentum: Any, flight: Any, config: dict[str, Any]) -> None:
    _, delta, sent = flight
    torch._foreach_mul_(momentum, config["momentum"])
    torch._foreach_add_(momentum, delta)
    torch._foreach_add_(agreed, delta, alpha=-config["outer_lr"])
    torch._foreach_add_(agreed, momentum, alpha=-config["outer_lr"] * config["momentum"])
    for model, own in zip(models, sent, strict=True):
        with torch.no_grad():
            for p, a, before in zip(model.parameters(), agreed, own, strict=True):
                p.copy_(a + config["keep"] * (p - before))


def configurations(args: argparse.Namespace) -> list[dict[str, Any]]:
    base: dict[str, Any] = {
        "device": args.device, "width": args.width, "layers": args.layers, "steps": args.steps,
        "batch": args.batch, "evaluate": 40, "lr": 1e-3, "seed": 0, "workers": 1, "every": 1, "delay": 0,
        "keep": 1.0, "outer": False, "outer_lr": 1.0, "momentum": 0.0,
    }  # fmt: skip
    found = [{**base, "name": "ddp", "seed": seed} for seed in range(2)]

    def local(**changes: Any) -> None:
        found.append({**base, "name": "local", "outer": True, **changes})

    for every in (4, 16, 32):
        for outer_lr, momentum in ((0.7, 0.5), (0.9, 0.5), (0.6, 0.7), (1.2, 0.2), (1.4, 0.0)):
            local(workers=2, every=every, outer_lr=outer_lr, momentum=momentum)
    for every in (4, 32):
        for outer_lr, momentum in ((1.0, 0.5), (0.8, 0.6), (0.7, 0.7), (2.0, 0.0)):
            local(workers=4, every=every, outer_lr=outer_lr, momentum=momentum)
    for delay in (2, 8):
        local(workers=2, every=16, outer_lr=0.7, momentum=0.5, delay=delay)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=32)
    args = parser.parse_args()
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        for row in pool.imap_unordered(train, configurations(args)):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
