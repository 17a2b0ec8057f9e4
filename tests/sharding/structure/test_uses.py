"""What a block shares with the rest of a model: exact, or whole with the reason, or refused in the first pass."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from tests.sharding.jobs import convert, trained_gap
from tests.sharding.models import WIDTH
from torch import Tensor, nn

from trimtab.errors import TrimtabError
from trimtab.sharding.unit_block import sharded_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.pool import Pool

HIDDEN, HEADS, PLACES = 34, 6, 5


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.narrow(self.widen(x).relu())


class Attention(nn.Module):
    """By the width of a head; queries may come with a bias, values may be mixed with those of another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, bias: Tensor | None = None, values: Tensor | None = None) -> Any:
        q, k, v = (p(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for p in (self.q, self.k, self.v))
        mixed = v if values is None else (v + values) / 2
        y = F.scaled_dot_product_attention(q, k, mixed, bias)
        return x + self.o(y.transpose(1, 2).flatten(2)), v


class Layers(nn.Module):
    """Layers with a block that is divided in any case: a model without any is refused."""

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer(), layer()])
        self.last = nn.ModuleList([Mlp()])

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = x + layer(x)
        return x + self.last[0](x)


class Borrowed(Layers):
    """An activation with a parameter that belongs to the model, kept in a list: no module of the block has it."""

    def __init__(self) -> None:
        super().__init__(Mlp)
        self.slope = nn.PReLU()
        layer: Any
        for layer in self.layers:
            layer.borrowed = [self.slope]
            layer.forward = lambda x, layer=layer: layer.narrow(layer.borrowed[0](layer.widen(x)))

    def __deepcopy__(self, memo: Any) -> Borrowed:
        own = type(self)()
        own.double().load_state_dict(self.state_dict())
        return own


class Penalized(nn.Module):
    """The weight of a projection is read by the module around the block."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Mlp()

    def forward(self, x: Tensor) -> Any:
        return self.inner(x) + 0.01 * self.inner.widen.weight.square().sum()


class Stashing(Mlp):
    """Keeps its hidden values, of which the model computes a penalty."""

    def forward(self, x: Tensor) -> Any:
        self.hidden = self.widen(x).relu()
        return self.narrow(self.hidden)


class Sparse(Layers):
    def __init__(self) -> None:
        super().__init__(Stashing)

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        layer: Any
        for layer in self.layers:
            y = y + layer.hidden.mean()
        return y


class Adapted(nn.Linear):
    """An adapter in a subclass; as long as it is zero, outputs are those of a plain linear map."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.down, self.up = nn.Parameter(torch.randn(3, inputs)), nn.Parameter(torch.zeros(outputs, 3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.down.T @ self.up.T


class WithAdapter(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.widen = Adapted(WIDTH, HIDDEN)


class MixedValues(Layers):
    """The values of the first layer's heads are used in the second one."""

    def __init__(self) -> None:
        super().__init__(Attention)

    def forward(self, x: Tensor) -> Any:
        values = None
        for layer in self.layers:
            x, values = layer(x, None, values)
        return x + self.last[0](x)


class OnlyOutput(Attention):
    def forward(self, x: Tensor, bias: Tensor | None = None, values: Tensor | None = None) -> Any:
        return super().forward(x, bias, values)[0]


class Biased(Layers):
    """A bias by head of the model, given to each layer."""

    def __init__(self) -> None:
        super().__init__(OnlyOutput)
        self.bias = nn.Parameter(torch.randn(1, HEADS, PLACES, PLACES))

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x, self.bias[..., : x.shape[1], : x.shape[1]])
        return x + self.last[0](x)


class Unguessed(Biased):
    """The same, and no input of it can be guessed: its layers are tried without a bias."""

    def forward(self, x: Tensor) -> Any:
        assert x.shape[1] == PLACES
        return super().forward(x)


class Masked(Unguessed):
    """With a mask that is the same for all heads instead."""

    def forward(self, x: Tensor) -> Any:
        assert x.shape[1] == PLACES
        for layer in self.layers:
            x = layer(x, self.bias[:, :1].detach())
        return x + self.last[0](x)


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "borrowed": (Borrowed, "slope.weight of another module is used between its projections"),
    "penalized": (lambda: Layers(Penalized), "is also used outside of it"),
    "sparse": (Sparse, "are also used outside of it"),
    "adapter": (lambda: Layers(WithAdapter), "widen has more than a weight and a bias: down, up"),
    "mixed values": (MixedValues, "something outside of it uses values of its heads"),
    "biased": (Biased, ""),
    "unguessed": (Unguessed, "first pass"),
    "masked": (Masked, ""),
}
"""Each with part of the reason why something of it is whole on every rank; empty if all of it is divided."""


def loss(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    out: Tensor = model(torch.randn(2, PLACES, WIDTH, dtype=torch.float64, generator=generator))
    return out.square().mean()


def gaps() -> dict[str, tuple[float, str]]:
    """The largest difference, and why something is whole, or refused."""
    found = {}
    for name, (make, _) in MODELS.items():
        torch.manual_seed(0)
        alone = make().double()
        # Biases by head have as many places as the example: 8.
        if name == "biased":
            alone.bias = nn.Parameter(torch.randn(1, HEADS, 8, 8, dtype=torch.float64))
        spread = convert(copy.deepcopy(alone), shares=[1, 2])
        reasons = "; ".join(sharded_model(spread, "test").replicated.values())
        try:
            found[name] = trained_gap(alone, spread, loss), reasons
        except TrimtabError as error:
            found[name] = 0.0, f"first pass: {error}"
    return found


def test_what_a_block_shares_with_the_model_is_never_wrong(ranks: Pool) -> None:
    for found in ranks(2, gaps):
        for name, (gap, reasons) in found.items():
            expected = MODELS[name][1]
            assert gap < 1e-10, name
            assert bool(reasons) == bool(expected), (name, reasons)
            assert expected in reasons, (name, reasons)
        message = found["unguessed"][1]
        assert "OnlyOutput (layers.0)" in message
        assert "with the arguments bias, which it did not have on example inputs" in message
