"""Data to train on: the Python standard library's own source, scanned digits, and noise."""

from __future__ import annotations

import sysconfig
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, TensorDataset, default_collate

from trimtab.models.spec import NAMES, ModelSpec
from trimtab.random_bits import stream


@cache
def text() -> torch.Tensor:
    """The standard library's own source, as bytes."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def tokens(samples: int, length: int, *, step: int, rank: int = 0, seed: int = 0) -> torch.Tensor:
    """A rank's batch of one step: `length` + 1 bytes of text from random places, the same on every call."""
    starts = torch.randint(len(text()) - length - 1, (samples,), generator=_generator(seed, step, rank))
    return torch.stack([text()[start : start + length + 1] for start in starts.tolist()]).long()


def draw(
    data: Dataset[Any], samples: int, *, step: int, rank: int = 0, seed: int = 0
) -> tuple[torch.Tensor, ...]:
    """A rank's batch of one step from a dataset: random samples, the same on every call."""
    size = len(data)  # type: ignore[arg-type]
    chosen = torch.randint(size, (samples,), generator=_generator(seed, step, rank))
    batch = default_collate([data[index] for index in chosen.tolist()])
    return (batch,) if isinstance(batch, torch.Tensor) else tuple(batch)


class Passages(Dataset[torch.Tensor]):
    """The standard library's text in passages of one length."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return len(text()) // self._length

    def __getitem__(self, index: int) -> torch.Tensor:
        return text()[index * self._length : (index + 1) * self._length].long()


class Noise(Dataset[Any]):
    """Random values (or with `vocabulary` random tokens) with random labels, generated on the device."""

    def __init__(
        self, shape: tuple[int, ...], classes: int, device: torch.device, *, vocabulary: int | None = None
    ) -> None:
        self._shape, self._classes, self._device = shape, classes, device
        self._vocabulary = vocabulary

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        options: Any = {"generator": torch.Generator(self._device).manual_seed(index), "device": self._device}
        if self._vocabulary is None:
            values = torch.randn(self._shape, **options)
        else:
            values = torch.randint(self._vocabulary, self._shape, **options)
        return values, torch.randint(self._classes, (), **options)


class NoisyPatches(Dataset[Any]):
    """Ten classes of images in patches: each a typical image in noise."""

    classes, patches, patch_size = 10, 64, 48

    def __init__(self) -> None:
        shape = (self.classes, self.patches, self.patch_size)
        self._typical = torch.randn(shape, generator=torch.Generator().manual_seed(7))

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        label = torch.randint(self.classes, (), generator=generator)
        noise = torch.randn(self.patches, self.patch_size, generator=generator)
        return self._typical[label] * 0.3 + noise, label


def digits() -> TensorDataset:
    """Scanned digits in random order: 8 x 8 gray images and their classes (needs scikit-learn)."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return TensorDataset(images[order], torch.tensor(labels)[order].long())


def filled(spec: ModelSpec, step: int) -> tuple[Any, ...] | dict[str, Any]:
    """The batch of a model by name with values in it; they differ from step to step."""
    generator = torch.Generator().manual_seed(step)

    def values(x: torch.Tensor) -> torch.Tensor:
        if x.is_floating_point():
            filling = torch.randn(x.shape, generator=generator, dtype=x.dtype)
        elif x.dim() > 1:
            filling = tokens(x.shape[0], x.shape[1] - 1, step=step)
        else:
            filling = torch.arange(x.shape[0]) % 2
        return filling.to(x.device)

    if isinstance(spec.batch, dict):
        return {name: values(x) for name, x in spec.batch.items()}
    return tuple(values(x) for x in spec.batch)


CALIBRATION_BATCHES = 2


def calibration(spec: ModelSpec) -> list[Any]:
    """Batches on which the effect of lower precision on a model's gradient is measured."""
    return [filled(spec, step) for step in range(CALIBRATION_BATCHES)] if spec.name in NAMES else [spec.batch]


def _generator(seed: int, step: int, rank: int) -> torch.Generator:
    # Hashed: torch's generator on the CPU looks at the low 32 bits of a seed only.
    return torch.Generator().manual_seed(stream(seed, step, rank, 0) & 0xFFFFFFFF)
