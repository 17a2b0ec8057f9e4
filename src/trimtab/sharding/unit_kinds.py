"""Kinds of modules that are sums of units, and the names of their projections."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Mlp:
    """A module that computes out(act(in₁(x)), …), where everything in between is elementwise on the hidden units."""

    ins: tuple[str, ...]
    """Names of the projections to the hidden units: one, or gate and up."""

    out: str
    """Name of the projection back."""


@dataclass(frozen=True, kw_only=True)
class Attention:
    """A module that computes attention by heads, and whose forward pass works with any number of heads.

    It must split heads by their width (`view(..., -1, head_dim)`), or by an attribute with "head" in its name that
    holds their number, which is set to that of this rank. Give either `qkv`, one projection to all queries, then all
    keys, then all values, or the three projections `query`, `key` and `value`.
    """

    out: str
    """Name of the projection from the heads back."""

    head_dim: str = "head_dim"
    """Attribute with the width of a head; names with dots are of modules inside, here and for the projections."""

    qkv: str | None = None
    query: str | None = None
    key: str | None = None
    value: str | None = None
    local_width: str | None = None
    """Attribute with the width of all heads, which is set to the width of this rank's heads."""

    dropout: str | None = None
    """Attribute with the dropout of attention weights: a number or an `nn.Dropout`."""

    without: tuple[str, ...] = ()
    """Attributes that must be false or absent, because they mark variants that are not a sum over heads."""


@dataclass(frozen=True, kw_only=True)
class Units:
    """Units found in the structure of a module (`trimtab.sharding.structure`): any two or more linear maps."""

    ins: tuple[tuple[str, tuple[int, ...]], ...]
    """Names of the projections to the units, each with the entries of one unit in each part of its outputs."""

    out: str
    """Name of the projection back."""

    width: int
    """Inputs of `out` that belong to one unit."""

    heads: int
    """Heads in one unit; 0 for the hidden units of an MLP."""

    inside: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Modules and those of their parameters that every unit uses: a rank's gradient of them is that of its units."""

    @property
    def parts(self) -> dict[str, tuple[int, ...]]:
        return dict(self.ins)


@dataclass(frozen=True, kw_only=True)
class TorchAttention:
    """An `nn.MultiheadAttention`, whose projections are parameters of its own."""

    out: str = "out_proj"


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Experts in tensors with one slice for each, as transformers 5 stores them: an expert is a unit."""

    names: tuple[str, ...]
    """Names of the tensors."""

    out: str = ""


UnitKind = Mlp | Attention
"""What a user can declare."""

AnyKind = UnitKind | Units | TorchAttention | Experts

_SEPARATE = Attention(query="q_proj", key="k_proj", value="v_proj", out="o_proj", dropout="attention_dropout")
ATTENTIONS: dict[str, Attention] = {
    "GPT2Attention": Attention(
        qkv="c_attn",
        out="c_proj",
        local_width="split_size",
        dropout="attn_dropout",
        without=("is_cross_attention",),
    ),
    "LlamaAttention": _SEPARATE,
    "MistralAttention": _SEPARATE,
    "Qwen2Attention": _SEPARATE,
    "ViTAttention": _SEPARATE,
}
"""Attention modules known to work with any number of heads, by the name of their class or of a base class."""

OWN_GPTS = (
    Attention(qkv="qkv", out="projection", head_dim="head_width"),
    Attention(qkv="qkv", out="out"),
)
"""The attention of the project's own GPTs (of the examples, of the benches): any module with these three names."""

MLPS: tuple[Mlp, ...] = (
    Mlp(ins=("gate_proj", "up_proj"), out="down_proj"),
    Mlp(ins=("gate", "up"), out="down"),
    Mlp(ins=("w1", "w3"), out="w2"),
    Mlp(ins=("up_proj",), out="down_proj"),
    Mlp(ins=("up",), out="down"),
    Mlp(ins=("c_fc",), out="c_proj"),
    Mlp(ins=("fc1",), out="fc2"),
)
"""MLPs by the names of their projections; the first match is used."""

TORCH_MLP = Mlp(ins=("linear1",), out="linear2")
"""That of torch's own transformer layers."""
