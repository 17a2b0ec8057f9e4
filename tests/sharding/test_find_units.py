"""What cannot be converted is refused by name, before anything is changed."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.sharding.jobs import convert
from tests.sharding.models import WIDTH, make
from torch import nn

import trimtab
from trimtab.errors import TrimtabError
from trimtab.models.families import FAMILIES
from trimtab.sharding import Attention, Checkpoint, Mlp, clip_grad_norm_
from trimtab.sharding.projection import InProjection
from trimtab.sharding.unit_block import sharded_model

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

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.fc2(self.norm(self.fc1(x)))


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

    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=8, n_head=2, n_layer=1, vocab_size=9, add_cross_attention=True)
    model: nn.Module = transformers.GPT2Model(config)
    return model


MODELS: dict[str, Any] = {
    "normed": lambda: nn.ModuleList([Normed()]),
    "nothing": lambda: nn.Linear(3, 3),
    "tied": tied,
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
        (2, "normed", {}, "no units in this ModuleList: 0.fc2 (all its inputs depend on common values"),
        (2, "nothing", {}, "no units in this Linear"),
        (2, "tied", {}, "blocks.0.up.weight and blocks.1.up.weight are one tensor"),
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


def described(kinds: Any) -> float:
    x = torch.ones(2, WIDTH)
    alone: Any = strange()
    converted: Any = convert(strange(), kinds=kinds)
    assert type(converted[0][1].widen) is InProjection
    blocks: Any = make("gpt").get_submodule("blocks")
    left: Any = convert(nn.ModuleList([*alone[0], *blocks]), replicate=["0", "1"])
    assert type(left[0].widen) is nn.Linear
    return float((alone[0][0](x) - converted[0][0](x)).abs().max())


@pytest.mark.parametrize(
    "kinds", [{}, {Strange: Mlp(ins=("widen",), out="narrow")}], ids=["found", "described"]
)
def test_own_modules_are_found_or_described_or_left_alone(ranks: Pool, kinds: Any) -> None:
    assert max(ranks(2, described, kinds)) < 1e-6


def partly_split() -> tuple[dict[str, str], list[str], float]:
    """A layer with units beside one without, cross-attention with a fused key and value, and a description by hand."""
    mixed = convert(nn.ModuleList([Strange(), Normed()]))
    alone: Any = cross_attention().eval()
    spread: Any = convert(copy.deepcopy(alone), shares=[1, 1])
    tokens, encoded = (
        torch.arange(6).view(2, 3),
        torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0)),
    )
    outputs = [model(tokens, encoder_hidden_states=encoded)[0] for model in (alone, spread)]
    blocks = list(sharded_model(spread, "").blocks)
    return sharded_model(mixed, "").replicated, blocks, float((outputs[0] - outputs[1]).abs().max())


def test_what_has_no_units_is_replicated_with_the_reason(ranks: Pool) -> None:
    for replicated, blocks, difference in ranks(2, partly_split):
        assert set(replicated) == {"1.fc1", "1.fc2"}
        assert "single unit" in replicated["1.fc2"]
        assert blocks == ["h.0.attn", "h.0.crossattention", "h.0.mlp"]
        assert difference < 1e-5


class Unreached(nn.Module):
    """An MLP under well-known names, in a layer that no example input fits."""

    def __init__(self, mixes: bool) -> None:
        super().__init__()
        self.fc1, self.fc2, self.mixes = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH), mixes

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.fc1(x)
        return self.fc2(hidden.softmax(-1) if self.mixes else hidden.relu())


class Keyed(nn.Module):
    def __init__(self, mixes: bool) -> None:
        super().__init__()
        self.mlp = Unreached(mixes)

    def forward(self, streams: dict[str, torch.Tensor]) -> Any:
        return self.mlp(streams["x"])


def unreached(mixes: bool) -> float | str:
    torch.manual_seed(0)
    alone: Any = nn.ModuleList([Keyed(mixes)])
    spread: Any = convert(copy.deepcopy(alone), shares=[2, 1])
    streams = {"x": torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(0))}
    try:
        return float((alone[0](streams) - spread[0](streams)).abs().max())
    except TrimtabError as error:
        return str(error)


def test_what_only_its_names_tell_is_checked_in_the_first_forward_pass(ranks: Pool) -> None:
    for gap, message in zip(ranks(2, unreached, False), ranks(2, unreached, True), strict=True):
        assert gap < 1e-6
        assert "Unreached (0.mlp) cannot be sharded as the names of its projections suggest" in message
        assert "replicate=['0.mlp']" in message


def bert_by_hand() -> tuple[float, list[str]]:
    from transformers.models.bert.modeling_bert import BertAttention, BertLayer

    family = next(family for family in FAMILIES if family.name == "BERT")
    alone = family.make()
    projections: Any = {
        "query": "self.query",
        "key": "self.key",
        "value": "self.value",
        "out": "output.dense",
    }
    attention = Attention(**projections, head_dim="self.attention_head_size")
    mlp = Mlp(ins=("intermediate.dense",), out="output.dense")
    spread = convert(copy.deepcopy(alone), kinds={BertAttention: attention, BertLayer: mlp}, shares=[2, 1])
    gap = float((family.loss(alone, 0) - family.loss(spread, 0)).abs())
    return gap, [name for name, block in sharded_model(spread, "").blocks.items() if block.units == 6]


def test_names_with_dots_describe_projections_of_inner_modules(ranks: Pool) -> None:
    for gap, attentions in ranks(2, bert_by_hand):
        assert gap < 1e-10
        assert attentions == [f"bert.encoder.layer.{layer}.attention" for layer in range(2)]


class Heads(nn.Module):
    """Attention that knows its number of heads, as the user's own module might."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        self.layout, self.count, self.heads, self.head_dim = layout, 4, 4, WIDTH // 4
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        batch, length, _ = x.shape
        heads = self.count if self.layout == "hidden count" else self.heads
        if self.layout == "interleaved":
            q, k, v = self.qkv(x).view(batch, -1, heads, 3 * self.head_dim).transpose(1, 2).chunk(3, -1)
        else:
            q, k, v = (
                part.reshape(batch, -1, heads, self.head_dim).transpose(1, 2)
                for part in self.qkv(x).chunk(3, -1)
            )
        hidden = nn.functional.scaled_dot_product_attention(q, k, v, bias)
        return x + self.out(hidden.transpose(1, 2).reshape(batch, length, -1))


def sharded_heads(layout: str) -> tuple[float, str]:
    """The largest difference to the unsharded module, and the refusal of the conversion or of the first pass."""
    torch.manual_seed(0)
    alone = nn.ModuleList([Heads(layout), Heads(layout)])
    model = copy.deepcopy(alone)
    before = [(name, id(p)) for name, p in model.named_parameters()]
    x = torch.randn(3, 8, WIDTH, generator=torch.Generator().manual_seed(1))
    bias = torch.arange(4.0).view(4, 1, 1).expand(4, 8, 8).tril() if layout == "biased" else None
    try:
        convert(model, kinds={Heads: Attention(qkv="qkv", out="out")}, shares=[3, 1])
    except TrimtabError as error:
        assert [(name, id(p)) for name, p in model.named_parameters()] == before
        return 0.0, f"conversion: {error}"
    try:
        return max(
            float((a(x, bias) - b(x, bias)).abs().max()) for a, b in zip(alone, model, strict=True)
        ), ""
    except TrimtabError as error:
        return 0.0, f"first pass: {error}"


@pytest.mark.parametrize(
    ("layout", "refusal"),
    [
        ("by number", ""),  # the attribute is found, and set to the rank's number of heads
        ("hidden count", ""),  # the size in the view is replaced
        ("interleaved", "conversion: tensor_parallel: Heads (0) cannot be sharded as kinds= declares it"),
        ("biased", "first pass: tensor_parallel: Heads (0) cannot be sharded as kinds= declares it"),
    ],
)
def test_declared_heads_are_equal_or_refused(ranks: Pool, layout: str, refusal: str) -> None:
    for difference, message in ranks(2, sharded_heads, layout):
        assert difference < 1e-5
        assert message.startswith(refusal)
        assert bool(message) == bool(refusal)


def sharded_opt() -> tuple[float, float]:
    import transformers
    from transformers.models.opt.modeling_opt import OPTAttention

    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 64, "num_attention_heads": 4}
    config = transformers.OPTConfig(vocab_size=40, num_hidden_layers=2, max_position_embeddings=32, **sizes)
    alone: Any = transformers.OPTForCausalLM(config).eval()
    projections: Any = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "out_proj"}
    model: Any = convert(copy.deepcopy(alone), kinds={OPTAttention: Attention(**projections)})
    tokens = torch.arange(16).view(2, 8)
    expected = alone(tokens).logits
    return float((model(tokens).logits - expected).abs().max()), float(expected.abs().max())


def test_opt_has_the_outputs_of_a_single_device(ranks: Pool) -> None:
    for difference, size in ranks(2, sharded_opt):
        assert difference < 1e-5 * size


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


@pytest.mark.parametrize("mesh", [None, 2, "tp"])
def test_what_is_no_mesh_is_refused(mesh: Any) -> None:
    with pytest.raises(TrimtabError, match=r"expected a DeviceMesh, got .*init_device_mesh"):
        trimtab.tensor_parallel(make("gpt"), mesh)


def test_verbs_ask_for_a_converted_model() -> None:
    with pytest.raises(TrimtabError, match="convert it first"):
        clip_grad_norm_(make("gpt"), 1.0)
    with pytest.raises(TrimtabError, match="convert it first"):
        Checkpoint(make("gpt"))
