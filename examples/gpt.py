"""Train a small GPT on the source text of Python's own standard library: no download. Its training is plain torch.

    python examples/gpt.py                                       # single process, on a GPU if there is one
    torchrun --nproc-per-node 2 examples/gpt.py                  # data parallel
    trimtab emulate CLUSTER.yaml -- examples/gpt.py              # data parallel over emulated, uneven hosts
    python examples/gpt.py --steps=1000 --width=256 --checkpoint=gpt.pt
    python examples/gpt.py --steps=2000 --width=256 --resume=gpt.pt

Every knob below can be set on the command line as --name=value.
"""

from __future__ import annotations

import json as json_module
import math
import os
import pickle
import statistics
import sys
import sysconfig
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trimtab.models.gpt import Gpt  # the model of `--model gpt`; plain torch

# --- knobs ---
steps = 200  # optimizer steps in total, including those before a resume
batch = 8  # sequences per rank and step
context = 128  # bytes of context
width = 128
layers = 4
heads = 4
lr = 2e-3
warmup = 20  # steps of learning-rate warm-up
weight_decay = 0.1
clip = 1.0  # gradient-norm clipping
seed = 0
log_every = 10
evaluate_every = 0  # 0: only at the end
evaluate_batches = 16  # over all ranks
checkpoint = ""  # file to write at the end, and every save_every steps
save_every = 0
resume = ""  # checkpoint to continue from
device = "auto"  # cpu, cuda, or auto: cuda if available
bf16 = 0  # 1: matrix products in bfloat16
json = 0  # 1: a last line with the results as JSON
# -------------

KNOBS = {
    name: value
    for name, value in list(globals().items())
    if isinstance(value, (int, float, str)) and not name.startswith("_")
}


def fail(message: str) -> NoReturn:
    sys.exit(f"gpt.py: {message}")


def read_knobs(arguments: list[str]) -> None:
    """Set the knobs above from --name=value."""
    for argument in arguments:
        if argument in ("-h", "--help"):
            print(__doc__)
            print("\n".join(f"  --{name}={value}" for name, value in KNOBS.items()))
            sys.exit()
        name, equals, text = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or not equals or name not in KNOBS:
            fail(f"{argument!r} is not --name=value with a name among {', '.join(KNOBS)}")
        kind = type(KNOBS[name])
        try:
            globals()[name] = kind(text)
        except ValueError:
            fail(f"--{name} takes {kind.__name__}, not {text!r}")
    for name in ("steps", "batch", "context", "width", "layers", "heads", "log_every", "evaluate_batches"):
        if globals()[name] < 1:
            fail(f"--{name} must be at least 1, not {globals()[name]}")
    if width % heads:
        fail(f"--width={width} cannot be divided among --heads={heads}")
    if device not in ("auto", "cpu", "cuda"):
        fail(f"--device is auto, cpu or cuda, not {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        fail("--device=cuda, but torch finds no GPU")


def load_text() -> tuple[Tensor, Tensor]:
    """Training and validation text as bytes; every twentieth file is for validation."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    parts = ([file for i, file in enumerate(files) if i % 20], files[::20])
    texts = [bytearray(b"\n".join(file.read_bytes() for file in part)) for part in parts]
    if len(texts[1]) <= context:
        fail(f"--context={context} is longer than the {len(texts[1])} bytes of text to validate on")
    train, validation = (torch.frombuffer(text, dtype=torch.uint8) for text in texts)
    return train, validation


def draw(text: Tensor, number: int, place: torch.device) -> Tensor:
    """Batch `number`. It depends on nothing else, so a resumed run sees the same data as an uninterrupted one."""
    generator = torch.Generator().manual_seed(number)
    starts = torch.randint(len(text) - context, (batch, 1), generator=generator)
    return text[starts + torch.arange(context + 1)].to(place, torch.long)


def mean_over_ranks(total: Tensor, count: int) -> float:
    values = torch.stack([total.detach(), torch.full_like(total, count)]).double()
    if dist.is_initialized():
        dist.all_reduce(values)
    return float(values[0] / values[1])


@torch.no_grad()
def evaluate(model: Gpt, text: Tensor, place: torch.device, rank: int, world_size: int) -> float:
    """Mean loss over fixed validation batches, each computed by one rank: the same on any number of ranks."""
    numbers = range(rank, evaluate_batches, world_size)
    losses = [model(draw(text, number, place)) for number in numbers]
    total = torch.stack(losses).sum() if losses else torch.zeros((), device=place)
    return mean_over_ranks(total, len(losses))


def save(path: str, model: Gpt, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write to a temporary file and rename it, so that an interruption leaves the old checkpoint intact."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    torch.save(state, f"{path}.part")
    Path(f"{path}.part").replace(path)


def load(path: str, model: Gpt, optimizer: torch.optim.Optimizer, place: torch.device) -> int:
    if not Path(path).is_file():
        fail(f"--resume={path}: no such file")
    try:
        state: dict[str, Any] = torch.load(path, map_location=place, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return int(state["step"])
    except (RuntimeError, KeyError, ValueError, TypeError, EOFError, pickle.UnpicklingError):
        fail(f"--resume={path} is not a checkpoint of this model; pass the knobs it was trained with")


def main() -> None:
    read_knobs(sys.argv[1:])
    distributed = "RANK" in os.environ  # set by torchrun
    place = torch.device(
        "cuda" if device == "cuda" or (device == "auto" and torch.cuda.is_available()) else "cpu"
    )
    if place.type == "cuda":
        place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
        torch.cuda.set_device(place)
    if distributed:
        dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)

    train_text, validation_text = load_text()
    torch.manual_seed(seed)
    model = Gpt(context=context, width=width, layers=layers, heads=heads).to(place)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=weight_decay)
    start = load(resume, model, optimizer, place) if resume else 0
    if start >= steps:
        fail(f"--resume={resume} is already at step {start}; raise --steps")
    trained: nn.Module = DistributedDataParallel(model) if distributed else model
    precision = torch.autocast(place.type, torch.bfloat16) if bf16 else nullcontext()
    if rank == 0:
        parameters = sum(parameter.numel() for parameter in model.parameters())
        ranks = f"{world_size} x {place.type}"
        print(f"{parameters / 1e6:.2f} M parameters, {len(train_text) / 1e6:.1f} MB of text, {ranks}")

    durations: list[float] = []
    losses: list[float] = []  # the printed ones
    validation = math.nan
    for step in range(start, steps):
        begin = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / warmup) if warmup else lr
        tokens = draw(train_text, ((seed + 1) * 1_000_000 + step) * 1_000 + rank, place)
        with precision:
            loss = trained(tokens)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if place.type == "cuda":
            torch.cuda.synchronize()
        durations.append(time.perf_counter() - begin)

        done = step + 1
        if step == start or done % log_every == 0 or done == steps:
            losses.append(mean_over_ranks(loss, 1))
            if rank == 0:
                typical = statistics.median(durations[-log_every:])
                speed = f"{typical * 1e3:7.1f} ms  {batch * context * world_size / typical:9,.0f} tokens/s"
                print(f"step {done:5d}  loss {losses[-1]:.4f}  {speed}", flush=True)
        if done == steps or (evaluate_every and done % evaluate_every == 0):
            validation = evaluate(model, validation_text, place, rank, world_size)
            if rank == 0:
                print(f"step {done:5d}  validation loss {validation:.4f}", flush=True)
        if rank == 0 and checkpoint and (done == steps or (save_every and done % save_every == 0)):
            save(checkpoint, model, optimizer, done)

    if rank == 0 and json:
        typical = statistics.median(durations)
        results = {
            "first_loss": losses[0],
            "final_loss": losses[-1],
            "validation_loss": validation,
            "median_step_ms": typical * 1e3,
            "tokens_per_s": batch * context * world_size / typical,
            "world_size": world_size,
            "device": place.type,
        }
        print(json_module.dumps(results), flush=True)
    if distributed:
        dist.barrier()  # a rank that leaves early can make the others abort
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
