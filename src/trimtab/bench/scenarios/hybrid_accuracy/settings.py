"""What `trimtab bench hybrid-accuracy` trains: small models from scratch on data that every machine has."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, TensorDataset

from trimtab.models.data import Passages, digits
from trimtab.models.tasks import Task

PACKAGES = 8
"""Packages of the standard library that a piece of source may be from."""

WORDS, VOCABULARY = 32, 2048
"""Words of a piece, and numbers that words are hashed to."""

NOISE = 0.15
"""Of the harder digits: its standard deviation, the largest value being 1."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A model with its data, and how it is trained."""

    make: Callable[[int], Task]
    """By the seed of its weights. The model's `net` computes the logits, its forward pass the mean loss."""

    steps: int
    lr: float

    runs: int = 1
    """For each seed of the bench, with seeds of their own: more where chance, or the damage, differs more by run."""


class Classifier(nn.Module):
    """Logits from `net`, and their mean loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.net(inputs).flatten(0, -2), labels.flatten())


class Logits(nn.Module):
    """A model of `transformers` that returns its logits alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.model(inputs).logits
        return logits


class BasicBlock(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def resnet18(width: int) -> nn.Module:
    """ResNet-18 for small gray images: four stages of two blocks, a convolution instead of the pooling stem."""
    stages: list[nn.Module] = [
        nn.Conv2d(1, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
    ]
    inputs = width
    for stage in range(4):
        outputs = width << stage
        stages += [BasicBlock(inputs, outputs, 2 if stage else 1), BasicBlock(outputs, outputs, 1)]
        inputs = outputs
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10))


@cache
def harder_digits() -> tuple[TensorDataset, TensorDataset]:
    """Scanned digits in many draws of a turn by up to 30 degrees and of noise: to train on and, of others, to test on.

    So many that no sample is seen twice. A few that are seen often are learned by heart, with a loss on others that
    chance moves further than rounding does.
    """
    images, labels = digits().tensors
    generator = torch.Generator().manual_seed(1)

    def drawn(part: slice, draws: int) -> TensorDataset:
        chosen = images[part].repeat(draws, 1, 1, 1)
        angle = (torch.rand(len(chosen), generator=generator) - 0.5) * torch.pi / 3
        turn = torch.stack([angle.cos(), -angle.sin(), angle * 0, angle.sin(), angle.cos(), angle * 0], 1)
        grid = F.affine_grid(turn.view(-1, 2, 3), list(chosen.shape), align_corners=False)
        turned = F.grid_sample(chosen, grid, align_corners=False)
        noisy = turned + NOISE * torch.randn(turned.shape, generator=generator)
        return TensorDataset(noisy, labels[part].repeat(draws))

    return drawn(slice(None, -700), 8), drawn(slice(-700, None), 4)


@cache
def source_pieces() -> tuple[TensorDataset, TensorDataset]:
    """Pieces of the standard library's largest packages with the package of each: to train on, and every fifth to
    test on."""
    library = Path(sysconfig.get_paths()["stdlib"])
    packages = [p for p in library.iterdir() if p.is_dir() and p.name.isidentifier() and p.name != "test"]
    by_package = {p.name: sorted(p.rglob("*.py")) for p in packages}
    by_package = {name: files for name, files in by_package.items() if len(files) >= 5}
    largest = sorted(by_package, key=lambda name: (-sum(f.stat().st_size for f in by_package[name]), name))
    parts: tuple[list[tuple[Tensor, int]], list[tuple[Tensor, int]]] = ([], [])
    for label, name in enumerate(sorted(largest[:PACKAGES])):
        for file in by_package[name]:
            words = re.findall(r"\w+|[^\w\s]", file.read_text(errors="replace"))
            numbers = torch.tensor([crc32(word.encode()) % VOCABULARY for word in words], dtype=torch.int64)
            pieces = numbers[: len(words) // WORDS * WORDS].view(-1, WORDS)
            for place, piece in enumerate(pieces):
                parts[place % 5 == 4].append((piece, label))
    train, test = (
        TensorDataset(torch.stack([piece for piece, _ in part]), torch.tensor([label for _, label in part]))
        for part in parts
    )
    return train, test


class NextBytes(Dataset[Any]):
    """Passages of the standard library's text, each with the same one byte later."""

    def __init__(self, length: int) -> None:
        self._passages = Passages(length + 1)

    def __len__(self) -> int:
        return len(self._passages)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        passage = self._passages[index]
        return passage[:-1], passage[1:]


def _resnet(seed: int, *, harder: bool) -> Task:
    torch.manual_seed(seed)
    model = Classifier(resnet18(16))
    if harder:
        train, test = harder_digits()
        return Task(model=model, train=train, held_out=test, samples=32)
    every = digits()
    train_set, test_set = Subset(every, range(1097)), Subset(every, range(1097, len(every)))
    return Task(model=model, train=train_set, held_out=test_set, samples=32)


def _bert(seed: int) -> Task:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(seed)
    config: Any = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=WORDS,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    config.num_labels = PACKAGES
    train, test = source_pieces()
    chosen = torch.randperm(len(test), generator=torch.Generator().manual_seed(0))[:800]
    model = Classifier(Logits(BertForSequenceClassification(config)))
    return Task(model=model, train=train, held_out=Subset(test, chosen.tolist()), samples=16)


def _gpt(seed: int) -> Task:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=256,
        n_positions=64,
        n_embd=128,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    passages = NextBytes(64)
    chosen = range(0, len(passages), len(passages) // 96)
    rest = sorted(set(range(len(passages))) - set(chosen))
    return Task(
        model=Classifier(Logits(GPT2LMHeadModel(config))),
        train=Subset(passages, rest),
        held_out=Subset(passages, chosen),
        samples=8,
    )


SETTINGS: dict[str, Setting] = {
    "resnet-digits": Setting(make=lambda seed: _resnet(seed, harder=False), steps=80, lr=3e-3, runs=2),
    "resnet-harder": Setting(make=lambda seed: _resnet(seed, harder=True), steps=80, lr=3e-3, runs=2),
    "bert-source": Setting(make=_bert, steps=120, lr=5e-4, runs=2),
    "gpt-bytes": Setting(make=_gpt, steps=150, lr=1e-3),
}
"""By name."""
