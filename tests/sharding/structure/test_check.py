"""Layers of one's own that cannot be divided exactly are whole with the reason, or refused."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from tests.sharding.jobs import convert, difference
from tests.sharding.models import WIDTH
from tests.sharding.structure.test_gradients import HIDDEN, Checkpointed, Mlp, Plain
from torch import Tensor, nn

from trimtab.errors import TrimtabError
from trimtab.sharding import Mlp as MlpKind
from trimtab.sharding.unit_block import sharded_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.pool import Pool


class Dropping(Mlp):
    """Functional dropout with a probability that is no attribute."""

    def forward(self, x: Tensor) -> Any:
        return x + self.narrow(F.dropout(self.widen(x).relu(), 0.25, self.training))


class Noisy(Mlp):
    """Random numbers for the hidden units."""

    def forward(self, x: Tensor) -> Any:
        hidden = self.widen(x).relu()
        return x + self.narrow(hidden * torch.rand_like(hidden) if self.training else hidden)


class Bounded(Mlp):
    """A bound on the norm of all hidden units, which an example's small values do not reach."""

    def forward(self, x: Tensor) -> Any:
        hidden = self.widen(x).relu()
        return x + self.narrow(hidden / (hidden.norm(dim=-1, keepdim=True) / 20).clamp_min(1))


class BoundedByHand(Mlp):
    """A bound on the largest hidden value that Python looks at."""

    def forward(self, x: Tensor) -> Any:
        hidden = self.widen(x).relu()
        largest = hidden.max()
        return x + self.narrow(hidden * (8 / largest) if largest > 8 else hidden)


class BoundedScores(nn.Module):
    """Attention with a bound on the largest score of all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        q, k, v = (p(x).view(*x.shape[:2], -1, 4).transpose(1, 2) for p in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2)
        scores = scores / (scores.abs().amax() / 20).clamp_min(1)
        return x + self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Functional(nn.Module):
    """Projections with well-known names that are never called."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Any:
        hidden = F.linear(x, self.up.weight, self.up.bias).relu()
        return x + F.linear(hidden, self.down.weight, self.down.bias)


class Undeclarable(Mlp):
    """Cannot run on examples; its scale is between the projections."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, x: Tensor) -> Any:
        if x.shape[1] != 5:
            raise ValueError("five places, please")
        return x + self.narrow((self.widen(x) * self.scale).relu())


def two(layer: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(layer(), Plain()).double()


def example() -> Tensor:
    return torch.randn(2, 5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def hooked(on: str) -> nn.Module:
    model = two(Plain)
    linear: Any = model.get_submodule("0.widen")
    if on == "module":
        linear.register_forward_hook(lambda _module, _args, output: output * 2)
    elif on == "parameter":
        linear.weight.register_hook(lambda gradient: gradient * 2)
    else:
        torch.nn.utils.parametrizations.weight_norm(linear)
    return model


def tied() -> nn.Module:
    model = nn.Sequential(*(nn.TransformerEncoderLayer(WIDTH, 2, HIDDEN) for _ in range(2))).double()
    first, second = (model.get_submodule(f"{i}.self_attn") for i in range(2))
    second.in_proj_weight = first.in_proj_weight
    return model


def whole() -> dict[str, str]:
    """Why each of these is whole on every rank, or the error."""
    found = {}
    models: dict[str, Callable[[], nn.Module]] = {
        "module hook": lambda: hooked("module"),
        "parameter hook": lambda: hooked("parameter"),
        "weight norm": lambda: hooked("parametrization"),
        "dropping": lambda: two(Dropping),
        "noisy": lambda: two(Noisy),
        "tied": tied,
        "bounded": lambda: two(Bounded),
        "bounded by hand": lambda: two(BoundedByHand),
        "bounded scores": lambda: two(BoundedScores),
        "functional": lambda: two(Functional),
    }
    for name, make in models.items():
        alone = make()
        try:
            spread = convert(make(), shares=[1, 2])  # not a copy, which has no hooks of parameters
        except TrimtabError as error:
            found[name] = str(error)
            continue
        found[name] = "; ".join(sharded_model(spread, "test").replicated.values())
        for model in (alone.eval(), spread.eval()):
            model(20 * example()).square().mean().backward()
        assert difference(alone, spread, lambda p: p.grad) < 1e-10, name
    spread = convert(two(Undeclarable), kinds={Undeclarable: MlpKind(ins=("widen",), out="narrow")})
    try:
        spread(example().requires_grad_())
    except TrimtabError as error:
        found["declared"] = str(error)
    spread = convert(two(Plain))
    loss = spread(example().requires_grad_()).square().mean()
    try:
        torch.autograd.grad(loss, list(spread.parameters()), create_graph=True)
    except TrimtabError as error:
        found["second derivatives"] = str(error)
    return found


def test_what_cannot_be_exact_is_whole_or_refused(ranks: Pool) -> None:
    for found in ranks(2, whole):
        assert "hooks are registered on widen" in found["module hook"]
        assert "hooks are registered on widen" in found["parameter hook"]
        assert found["weight norm"]
        assert "'drop' in its name" in found["dropping"]
        assert "random numbers" in found["noisy"]
        assert "are one tensor" in found["tied"]
        for name in ("bounded", "bounded by hand", "bounded scores"):
            assert "with larger values the sum over its units is not its output" in found[name], name
        assert "does not call its last projection" in found["functional"]
        assert "scale is used between its projections" in found["declared"]
        assert "create_graph=True" in found["second derivatives"]


def twice_back() -> float:
    """Two backward passes through one graph; gradients add up."""
    alone = two(Checkpointed)
    spread = convert(copy.deepcopy(alone), shares=[1, 2])
    for model in (alone, spread):
        loss = model(example().requires_grad_()).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
    return difference(alone, spread, lambda p: p.grad)


def test_a_graph_can_be_gone_through_twice(ranks: Pool) -> None:
    assert max(ranks(2, twice_back)) < 1e-10
