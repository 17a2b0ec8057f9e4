"""What cannot be converted is refused by name, before anything is changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.sharding.jobs import convert
from tests.sharding.models import WIDTH, make
from torch import nn

from trimtab.errors import TrimtabError
from trimtab.sharding import Attention, Checkpoint, Mlp, clip_grad_norm_

if TYPE_CHECKING:
    from tests.support.pool import Pool


class Strange(nn.Module):
    """An MLP under names nobody knows."""

    def __init__(self) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.narrow(self.widen(x).relu())


class Normed(nn.Module):
    """A norm over the hidden units: no sum over them."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Linear(WIDTH, 40), nn.LayerNorm(40), nn.Linear(40, WIDTH)


def strange() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.ModuleList([Strange(), Strange()]))


def tied() -> nn.Module:
    model = make("gpt")
    blocks: Any = model.get_submodule("blocks")
    blocks[1].up.weight = blocks[0].up.weight
    return model


def cross_attention() -> nn.Module:
    import transformers

    config = transformers.GPT2Config(n_embd=8, n_head=2, n_layer=1, vocab_size=9, add_cross_attention=True)
    model: nn.Module = transformers.GPT2Model(config)
    return model


MODELS: dict[str, Any] = {
    "unknown": strange,
    "normed": lambda: nn.ModuleList([Normed()]),
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2), 1),
    "nothing": lambda: nn.Linear(3, 3),
    "tied": tied,
    "cross": cross_attention,
    "narrow": lambda: make("llama"),
    "fine": lambda: make("gpt"),
}


def refusal(model: str, options: dict[str, Any]) -> str:
    built = MODELS[model]()
    before = [(name, id(p)) for name, p in built.named_parameters()]
    try:
        convert(built, **options)
    except TrimtabError as error:
        assert [(name, id(p)) for name, p in built.named_parameters()] == before
        return str(error)
    return "not refused"


@pytest.mark.parametrize(
    ("world", "model", "options", "expected"),
    [
        (2, "unknown", {}, "modules of unknown type: Strange (0.0)"),
        (2, "normed", {}, "modules of unknown type: Normed (0)"),
        (2, "encoder", {}, "MultiheadAttention (layers.0.self_attn)"),
        (2, "nothing", {}, "no MLP or attention of a known kind in this Linear"),
        (2, "tied", {}, "blocks.0.up.weight and blocks.1.up.weight are one tensor"),
        (2, "cross", {}, "a GPT2Attention with is_cross_attention is not supported"),
        (4, "narrow", {}, "model.layers.0.self_attn (LlamaAttention) has 3 units for 4 ranks"),
        (2, "fine", {"shares": [1]}, "shares has 1 numbers for 2 ranks"),
        (2, "fine", {"shares": [1, -1]}, "give each rank a speed of at least 0"),
        (2, "fine", {"shares": "best"}, "the only word is 'measured'"),
        (2, "fine", {"shares": {"blocks.0.mlp": [[0], [1]]}}, "is in only one of shares and the model"),
        (2, "fine", {"headroom": -0.1}, "headroom must be at least 0, got -0.1"),
    ],
)
def test_refused_by_name(ranks: Pool, world: int, model: str, options: dict[str, Any], expected: str) -> None:
    for message in ranks(world, refusal, model, options):
        assert expected in message


def described() -> float:
    x = torch.ones(2, WIDTH)
    alone: Any = strange()
    converted: Any = convert(strange(), kinds={Strange: Mlp(ins=("widen",), out="narrow")})
    blocks: Any = make("gpt").get_submodule("blocks")
    left: Any = convert(nn.ModuleList([*alone[0], *blocks]), replicate=["0", "1"])
    assert type(left[0].widen) is nn.Linear
    return float((alone[0][0](x) - converted[0][0](x)).abs().max())


def test_own_modules_can_be_described_or_left_alone(ranks: Pool) -> None:
    assert max(ranks(2, described)) < 1e-6


def wrongly_described(kind: Attention | Mlp, head_dim: int | None) -> str:
    model = strange()
    for module in model.modules():
        if head_dim and isinstance(module, Strange):
            module.__dict__["head_dim"] = head_dim
    try:
        convert(model, kinds={Strange: kind})
    except TrimtabError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "head_dim", "expected"),
    [
        (Attention(qkv="widen", out="narrow"), None, "Strange.head_dim is not an integer"),
        (Attention(qkv="widen", out="narrow"), 4, "do not form heads of width 4"),
        (Attention(query="widen", out="narrow"), 4, "needs qkv, or query, key and value"),
        (Attention(qkv="wide", out="narrow"), 4, "Strange does not have the linear projections"),
        (Mlp(ins=("widen",), out="widen"), None, "have different hidden widths"),
    ],
)
def test_a_wrong_description_is_refused(ranks: Pool, kind: Any, head_dim: int | None, expected: str) -> None:
    assert expected in ranks(2, wrongly_described, kind, head_dim)[0]


def twice() -> str:
    model = convert(make("gpt"))
    try:
        convert(model)
    except TrimtabError as error:
        return str(error)
    return ""


def test_a_second_conversion_is_refused(ranks: Pool) -> None:
    assert "already tensor-parallel" in ranks(1, twice)[0]


def test_verbs_ask_for_a_converted_model() -> None:
    with pytest.raises(TrimtabError, match="convert it first"):
        clip_grad_norm_(make("gpt"), 1.0)
    with pytest.raises(TrimtabError, match="convert it first"):
        Checkpoint(make("gpt"))
