"""Train a small convolutional network on scikit-learn's handwritten digits, which come with the package.

    python examples/digits.py                                    # single process, on a GPU if there is one
    torchrun --nproc-per-node 2 examples/digits.py               # data parallel
    trimtab emulate CLUSTER.yaml -- examples/digits.py           # data parallel over emulated, uneven hosts
    python examples/digits.py --epochs=5 --checkpoint=digits.pt
    python examples/digits.py --epochs=9 --resume=digits.pt

Every knob below can be set on the command line as --name=value.
"""

from __future__ import annotations

import json as json_module
import os
import pickle
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

# --- knobs ---
epochs = 6  # in total, including those before a resume
batch = 32  # images per rank and step
width = 32  # channels of the first convolution
lr = 2e-3
seed = 0
checkpoint = ""  # file to write after every epoch
resume = ""  # checkpoint to continue from
device = "auto"  # cpu, cuda, or auto: cuda if available
json = 0  # 1: a last line with the results as JSON
# -------------

KNOBS = {
    name: value
    for name, value in list(globals().items())
    if isinstance(value, (int, float, str)) and not name.startswith("_")
}


def fail(message: str) -> NoReturn:
    sys.exit(f"digits.py: {message}")


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
    for name in ("epochs", "batch", "width"):
        if globals()[name] < 1:
            fail(f"--{name} must be at least 1, not {globals()[name]}")
    if device not in ("auto", "cpu", "cuda"):
        fail(f"--device is auto, cpu or cuda, not {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        fail("--device=cuda, but torch finds no GPU")


class ConvNet(nn.Module):
    """Two convolutions and two linear layers: 8 x 8 gray images to 10 logits."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, kernel_size=3, padding=1)
        self.hidden = nn.Linear(2 * width * 4 * 4, 4 * width)
        self.head = nn.Linear(4 * width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = F.gelu(self.conv1(images))
        x = F.max_pool2d(F.gelu(self.conv2(x)), 2)
        logits: Tensor = self.head(F.gelu(self.hidden(x.flatten(1))))
        return logits


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """1437 training and 360 validation images, in a fixed random split."""
    try:
        from sklearn import datasets
    except ImportError:
        fail("the images come with scikit-learn: pip install scikit-learn")
    pixels, labels = datasets.load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    targets = torch.tensor(labels, dtype=torch.long)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, validation = order[:1437], order[1437:]
    return TensorDataset(images[train], targets[train]), TensorDataset(
        images[validation], targets[validation]
    )


@torch.no_grad()
def evaluate(model: nn.Module, data: TensorDataset, place: torch.device) -> tuple[float, float]:
    """Loss and accuracy; the set is small, so every rank computes both."""
    images, targets = (tensor.to(place) for tensor in data.tensors)
    logits = model(images)
    accuracy = (logits.argmax(1) == targets).double().mean()
    return float(F.cross_entropy(logits, targets)), float(accuracy)


def save(path: str, model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> None:
    """Write to a temporary file and rename it, so that an interruption leaves the old checkpoint intact."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
    torch.save(state, f"{path}.part")
    Path(f"{path}.part").replace(path)


def load(path: str, model: nn.Module, optimizer: torch.optim.Optimizer, place: torch.device) -> int:
    if not Path(path).is_file():
        fail(f"--resume={path}: no such file")
    try:
        state: dict[str, Any] = torch.load(path, map_location=place, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return int(state["epoch"])
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

    train, validation = load_digits()
    # The order of an epoch depends on (seed, epoch) alone, so a resumed run sees the same data.
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(
        train, num_replicas=world_size, rank=rank, seed=seed
    )
    loader = DataLoader(train, batch_size=batch, sampler=sampler)
    torch.manual_seed(seed)
    model = ConvNet(width).to(place)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    start = load(resume, model, optimizer, place) if resume else 0
    if start >= epochs:
        fail(f"--resume={resume} has already done {start} epochs; raise --epochs")
    trained: nn.Module = DistributedDataParallel(model) if distributed else model

    durations: list[float] = []
    loss, accuracy = evaluate(model, validation, place)
    for epoch in range(start, epochs):
        sampler.set_epoch(epoch)
        begin = time.perf_counter()
        for images, targets in loader:
            optimizer.zero_grad(set_to_none=True)
            F.cross_entropy(trained(images.to(place)), targets.to(place)).backward()
            optimizer.step()
            if place.type == "cuda":
                torch.cuda.synchronize()
            durations.append(time.perf_counter() - begin)
            begin = time.perf_counter()
        loss, accuracy = evaluate(model, validation, place)
        if rank == 0:
            typical = statistics.median(durations[-len(loader) :])
            quality = f"validation loss {loss:.4f}  accuracy {accuracy:.3f}"
            print(f"epoch {epoch + 1:3d}  {quality}  {typical * 1e3:6.1f} ms per step", flush=True)
            if checkpoint:
                save(checkpoint, model, optimizer, epoch + 1)

    if rank == 0 and json:
        results = {
            "validation_loss": loss,
            "accuracy": accuracy,
            "median_step_ms": statistics.median(durations) * 1e3,
            "world_size": world_size,
            "device": place.type,
        }
        print(json_module.dumps(results), flush=True)
    if distributed:
        dist.barrier()  # a rank that leaves early can make the others abort
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
