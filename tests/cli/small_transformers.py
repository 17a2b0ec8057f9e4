"""Small models of transformers, each with a batch of four, for `--model module:function`."""

from __future__ import annotations

from typing import Any

import torch
import transformers as t
from torch import nn

from trimtab.models.spec import LossOnly

WORDS = 128
SHAPE: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2
}  # fmt: skip
MADE = tuple[nn.Module, tuple[torch.Tensor, ...]]


def _tokens() -> torch.Tensor:
    return torch.randint(0, WORDS, (4, 8), generator=torch.Generator().manual_seed(0))


def _text(model: nn.Module) -> MADE:
    return LossOnly(model), (_tokens(), _tokens())


def _classes(model: nn.Module, inputs: torch.Tensor) -> MADE:
    return LossOnly(model), (inputs, torch.zeros(4, dtype=torch.int64))


def llama() -> MADE:
    return _text(t.LlamaForCausalLM(t.LlamaConfig(**SHAPE, num_key_value_heads=1)))


def gpt2() -> MADE:
    return _text(
        t.GPT2LMHeadModel(t.GPT2Config(vocab_size=WORDS, n_embd=32, n_layer=3, n_head=2, n_positions=8))
    )


def bert() -> MADE:
    return _classes(t.BertForSequenceClassification(t.BertConfig(**SHAPE)), _tokens())


def vit() -> MADE:
    shape = {key: value for key, value in SHAPE.items() if key != "vocab_size"}
    config = t.ViTConfig(**shape, image_size=16, patch_size=8)
    return _classes(t.ViTForImageClassification(config), torch.randn(4, 3, 16, 16))


def t5() -> MADE:
    config = t.T5Config(vocab_size=WORDS, d_model=32, d_kv=16, d_ff=64, num_layers=3, num_heads=2)
    config.decoder_start_token_id = 0
    return _text(t.T5ForConditionalGeneration(config))


def mixtral() -> MADE:
    return _text(t.MixtralForCausalLM(t.MixtralConfig(**SHAPE, num_key_value_heads=1, num_local_experts=4)))


def mixtral_eager() -> MADE:
    """Its experts' shapes depend on values."""
    config = t.MixtralConfig(**SHAPE, num_key_value_heads=1, num_local_experts=4)
    config._experts_implementation = "eager"
    return _text(t.MixtralForCausalLM(config))
