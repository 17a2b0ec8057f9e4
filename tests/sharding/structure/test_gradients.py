"""Layers of one's own whose gradients are not simply those of their units: exact, or whole with the reason."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from tests.sharding.jobs import adamw, convert, difference
from tests.sharding.models import WIDTH
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trimtab.sharding.unit_block import sharded_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.pool import Pool

HIDDEN = 34


class Mlp(nn.Module):
    """Two linear maps; what happens between and around them is up to the layer."""

    widen: Any
    narrow: Any
    fc1: Any
    fc2: Any

    def __init__(self, first: str = "widen", second: str = "narrow") -> None:
        super().__init__()
        setattr(self, first, nn.Linear(WIDTH, HIDDEN))
        setattr(self, second, nn.Linear(HIDDEN, WIDTH))


class Both(Mlp):
    """One parameter between the projections and also outside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, x: Tensor) -> Any:
        return x + self.scale * self.narrow((self.widen(x) * self.scale).relu())


class BothNamed(Mlp):
    """As `Both`, with names that are known."""

    def __init__(self) -> None:
        super().__init__("fc1", "fc2")
        self.scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, x: Tensor) -> Any:
        return x + self.scale * self.fc2((self.fc1(x) * self.scale).relu())


class OneOfTwo(Mlp):
    """A module with one parameter inside the block and another one outside."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.outside = nn.Parameter(torch.tensor(1.3)), nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Any:
        return x + self.outside * self.narrow((self.widen(x) * self.inside).relu())


class Early(Mlp):
    """A parameter that is read before the block begins, and used inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Any:
        scale = self.inside.exp()
        return x + self.narrow((self.widen(x) * scale).relu())


class TwoBlocks(nn.Module):
    """One module that is called in both blocks of a layer."""

    def __init__(self, scale: Any = 1.3) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.expand, self.reduce = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.slope, self.scale = nn.PReLU(), scale

    def forward(self, x: Tensor) -> Any:
        x = x + self.narrow(self.slope(self.widen(x) * self.scale))
        return x + self.reduce(self.slope(self.expand(x) * self.scale))


class TwoBlocksOneScale(TwoBlocks):
    """And a parameter of the layer in both."""

    def __init__(self) -> None:
        super().__init__(nn.Parameter(torch.tensor(1.3)))


class SlopeOutside(Mlp):
    """A module that is called inside a block and also in front of it."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.PReLU()

    def forward(self, x: Tensor) -> Any:
        return x + self.narrow(self.slope(self.widen(self.slope(x))))


class Passing(Mlp):
    """Activations that pass by the hidden units: a gate of the input."""

    def __init__(self) -> None:
        super().__init__("fc1", "fc2")
        self.gate = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Any:
        return x + self.fc2(self.fc1(x).relu() * self.gate(x).sigmoid())


class PassingInput(Mlp):
    """The layer's own input, without any map, passes by the hidden units."""

    def forward(self, x: Tensor) -> Any:
        return x + self.narrow(self.widen(x).relu() * x.mean(-1, keepdim=True))


class Called(Mlp):
    """Known names, called three times in a pass."""

    def __init__(self) -> None:
        super().__init__("fc1", "fc2")
        self.slope = nn.PReLU()

    def forward(self, x: Tensor) -> Any:
        for _ in range(3):
            x = x + self.fc2(self.slope(self.fc1(x)))
        return x


class Counting(Mlp):
    """A buffer that training changes by what all hidden units are, and that is used later."""

    largest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.tensor(1.0))

    def forward(self, x: Tensor) -> Any:
        hidden = self.widen(x).relu()
        if self.training:
            with torch.no_grad():
                self.largest.copy_(0.9 * self.largest + 0.1 * hidden.abs().max())
        return x + self.narrow(hidden / self.largest)


class Steps(Mlp):
    """A buffer that every rank changes alike."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.tensor(0.0))

    def forward(self, x: Tensor) -> Any:
        if self.training:
            self.steps += 1
        return x + self.narrow(self.widen(x).relu() / (1 + self.steps))


class Checkpointed(Mlp):
    """Recomputed in the backward pass, with a parameter inside."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.reentrant, self.slope = reentrant, nn.PReLU()

    def forward(self, x: Tensor) -> Any:
        return x + checkpoint(self.feed, x, use_reentrant=self.reentrant)

    def feed(self, x: Tensor) -> Any:
        return self.narrow(self.slope(self.widen(x)))


class Ungraded(Mlp):
    """The block's input needs no gradient, and once its weights neither."""

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            x = x + self.narrow(self.widen(x).relu())
        return x + self.narrow(self.widen(x.detach()).relu())


class UngradedNamed(Mlp):
    def __init__(self) -> None:
        super().__init__("fc1", "fc2")

    forward = Ungraded.forward
    widen, narrow = property(lambda self: self.fc1), property(lambda self: self.fc2)


class Lora(nn.Module):
    """A frozen map with a trained one of low rank beside it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down, self.up = nn.Linear(inputs, 3, bias=False), nn.Linear(3, outputs, bias=False)

    def forward(self, x: Tensor) -> Any:
        return self.base(x) + self.up(self.down(x))


class LoraIn(nn.Module):
    """An adapter at the projection in."""

    def __init__(self) -> None:
        super().__init__()
        self.widen, self.narrow = Lora(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        return x + self.narrow(self.widen(x).relu())


class LoraBoth(LoraIn):
    """Adapters at both."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = Lora(HIDDEN, WIDTH)  # type: ignore[assignment]


class Frozen(Mlp):
    """Only what is inside the block is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.inside = nn.Parameter(torch.tensor(1.3))

    def forward(self, x: Tensor) -> Any:
        return x + self.narrow((self.widen(x) * self.inside).relu())


class Given(nn.Module):
    """A parameter of another module, given as an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.feed = nn.Parameter(torch.tensor(1.3)), GivenFeed()

    def forward(self, x: Tensor) -> Any:
        return x + self.feed(x, self.scale)


class GivenFeed(Mlp):
    def forward(self, x: Tensor, scale: Tensor) -> Any:
        return self.narrow((self.widen(x) * scale).relu())


class Weighted(nn.Module):
    """Attention of torch, whose weights are used as well."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed = nn.MultiheadAttention(WIDTH, 4, batch_first=True), Plain()

    def forward(self, x: Tensor) -> Any:
        attended, weights = self.attention(x, x, x)
        return self.feed(x + attended * (1 + weights.square().mean()))


class Plain(Mlp):
    def forward(self, x: Tensor) -> Any:
        return x + self.narrow(self.widen(x).relu())


LAYERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "both": (Both, "gradient of scale"),
    "both, known names": (BothNamed, "gradient of scale"),
    "one of two": (OneOfTwo, ""),
    "early": (Early, ""),
    "module in two blocks": (TwoBlocks, ""),
    "parameter in two blocks": (TwoBlocksOneScale, "gradient of scale"),
    "slope outside": (SlopeOutside, ""),
    "passing by": (Passing, "gradient"),
    "the input passes by": (PassingInput, "pass by"),
    "called three times": (Called, ""),
    "buffer": (Counting, "buffer"),
    "counter": (Steps, ""),
    "checkpoint": (Checkpointed, ""),
    "reentrant checkpoint": (lambda: Checkpointed(True), "without a graph"),
    "no gradient": (UngradedNamed, ""),
    "lora in": (LoraIn, ""),
    "lora": (LoraBoth, "are used by"),
    "frozen": (Frozen, ""),
    "layer of torch": (
        lambda: nn.TransformerEncoderLayer(WIDTH, 4, HIDDEN, dropout=0.0, batch_first=True),
        "",
    ),
    "attention weights": (Weighted, ""),
    "given": (Given, "gradient"),
}
"""Each with part of the reason why it is whole on every rank; empty if it is divided."""


def gaps(names: list[str]) -> dict[str, tuple[float, dict[str, str]]]:
    """The largest difference of three steps, and what is replicated; an error as a reason."""
    found = {}
    for name in names:
        torch.manual_seed(0)
        layer = LAYERS[name][0]
        # One block that is divided in any case: a model without any is refused.
        alone: nn.Module = nn.Sequential(layer(), Plain(), layer()).double()
        spread = convert(copy.deepcopy(alone), shares=[1, 2])
        models = (alone, spread)
        optimizers = [adamw(model) for model in models]
        worst = 0.0
        for step in range(3):
            x = torch.randn(2, 5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            losses = []
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                loss = model(x.clone().requires_grad_()).square().mean()
                loss.backward()
                losses.append(loss)
            worst = max(
                worst, float((losses[0] - losses[1]).detach().abs()), trained_difference(*models, True)
            )
            for optimizer in optimizers:
                optimizer.step()
            worst = max(worst, trained_difference(*models, False))
        found[name] = worst, sharded_model(spread, "test").replicated
    return found


def trained_difference(alone: nn.Module, spread: nn.Module, gradients: bool) -> float:
    for whole, part in zip(alone.parameters(), spread.parameters(), strict=True):
        assert (whole.grad is None) == (part.grad is None)
    return difference(alone, spread, lambda p: p.grad if gradients and p.grad is not None else p.data)


def test_gradients_are_those_of_a_single_device(ranks: Pool) -> None:
    for found in ranks(2, gaps, list(LAYERS)):
        for name, (gap, replicated) in found.items():
            assert gap < 1e-10, name
            reason = LAYERS[name][1]
            whole = {part: why for part, why in replicated.items() if not part.endswith("down")}
            assert bool(whole) == bool(reason), (name, replicated)
            assert not reason or any(reason in why for why in whole.values()), (name, replicated)
