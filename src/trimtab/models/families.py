"""Tiny models of many transformer families, with random weights and a batch for each.

Tensor parallelism is compared with a single device on each of them, in tests and in `trimtab bench tp`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

WIDTH, HEADS, GROUPS, HIDDEN, LAYERS, VOCABULARY, LENGTH, BATCH = 24, 6, 3, 34, 2, 19, 8, 2


@dataclass(frozen=True)
class Family:
    """A kind of model, and how to make a small one."""

    name: str
    model: str
    """Name of its class in transformers; of the own builder otherwise."""

    config: dict[str, Any] = field(default_factory=dict)
    inputs: str = "text"
    eager: bool = False
    """Whether attention is computed without a fused kernel."""

    units: tuple[str, ...] = ("heads", "hidden units")
    """What is split."""

    def make(self, seed: int = 0) -> nn.Module:
        """The model, in double precision; the seed sets every parameter."""
        torch.manual_seed(seed)
        model = _OWN[self.model]() if self.model in _OWN else self._from_transformers()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
        return model.double().train()

    def _from_transformers(self) -> nn.Module:
        transformers: Any = import_module("transformers")
        kind = getattr(transformers, self.model)
        config = kind.config_class(**self.config)
        config._attn_implementation = "eager" if self.eager else "sdpa"
        config._experts_implementation = "eager"  # the grouped product has no double precision
        model: nn.Module = kind(config)
        return model

    def loss(self, model: nn.Module, step: int) -> Tensor:
        """The loss on the batch of that step."""
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(2, VOCABULARY, (BATCH, LENGTH), generator=generator)
        pixels = torch.randn(BATCH, 3, 8, 8, generator=generator, dtype=torch.float64)
        if self.inputs == "activations":
            x = torch.randn(BATCH, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
            output = model(x) if self.model != "torch-decoder" else model(x, x.flip(1))
            total: Tensor = (output * x.roll(1, -1)).sum() / 10
            return total
        arguments: dict[str, Any] = {
            "text": {"input_ids": tokens, "labels": tokens},
            "classes": {"input_ids": tokens, "labels": tokens[:, 0] % 2},
            "images": {"pixel_values": pixels, "labels": tokens[:, 0] % 2},
            "both": {"input_ids": tokens, "pixel_values": pixels, "return_loss": True},
            "sound": {"input_features": pixels.new_zeros(BATCH, 4, 16) + pixels.mean((1, 2)).repeat(1, 2)[:, None],
                      "labels": tokens},
            "seq2seq": {"input_ids": tokens, "labels": tokens.flip(1)},
            "wave": {"input_values": pixels.flatten(1).repeat(1, 2), "labels": tokens[:, 0] % 2},
        }  # fmt: skip
        loss = model(**arguments[self.inputs]).loss
        assert isinstance(loss, Tensor)
        return loss


_COMMON = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS}
_TEXT = {**_COMMON, "vocab_size": VOCABULARY, "max_position_embeddings": 32, "pad_token_id": 0}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "intermediate_size": HIDDEN}
_BERT = {**_TEXT, **_NO_DROPOUT}
_LLAMA = {
    **_TEXT, "num_key_value_heads": GROUPS, "intermediate_size": HIDDEN, "use_cache": False,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_IMAGE = {**_COMMON, **_NO_DROPOUT, "image_size": 8, "patch_size": 4}
_CLIP = {**_COMMON, "intermediate_size": HIDDEN, "attention_dropout": 0.0}


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)


def _decoder() -> nn.Module:
    layer = nn.TransformerDecoderLayer(WIDTH, HEADS, HIDDEN, dropout=0.0, norm_first=True, batch_first=True)
    return nn.TransformerDecoder(layer, LAYERS)


_OWN: dict[str, Callable[[], nn.Module]] = {"torch-encoder": _encoder, "torch-decoder": _decoder}

FAMILIES: tuple[Family, ...] = (
    Family("BERT", "BertForMaskedLM", _BERT),
    Family("RoBERTa", "RobertaForSequenceClassification", _BERT, "classes"),
    Family(
        "DistilBERT",
        "DistilBertForMaskedLM",
        {
            "dim": WIDTH,
            "n_heads": HEADS,
            "n_layers": LAYERS,
            "hidden_dim": HIDDEN,
            "vocab_size": VOCABULARY,
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "max_position_embeddings": 32,
        },
    ),
    Family(
        "T5",
        "T5ForConditionalGeneration",
        {
            "d_model": WIDTH,
            "d_kv": 4,
            "d_ff": HIDDEN,
            "num_layers": LAYERS,
            "num_heads": HEADS,
            "dropout_rate": 0.0,
            "vocab_size": VOCABULARY,
            "decoder_start_token_id": 0,
            "feed_forward_proj": "gated-gelu",
        },
        "seq2seq",
    ),
    Family("GPT-NeoX", "GPTNeoXForCausalLM", {**_TEXT, "intermediate_size": HIDDEN, "use_cache": False}),
    Family(
        "OPT",
        "OPTForCausalLM",
        {
            **_TEXT,
            "ffn_dim": HIDDEN,
            "word_embed_proj_dim": WIDTH,
            "dropout": 0.0,
            "use_cache": False,
        },
    ),
    Family("Gemma2", "Gemma2ForCausalLM", {**_LLAMA, "head_dim": 4}, eager=True),
    Family("Qwen3", "Qwen3ForCausalLM", {**_LLAMA, "head_dim": 4}),
    Family("Phi3", "Phi3ForCausalLM", _LLAMA),
    Family(
        "Mixtral",
        "MixtralForCausalLM",
        {**_LLAMA, "num_local_experts": 5, "num_experts_per_tok": 2},
        units=("heads", "experts"),
    ),
    Family("DeiT", "DeiTForImageClassification", _IMAGE, "images"),
    Family(
        "CLIP",
        "CLIPModel",
        {
            "projection_dim": 8,
            "text_config": {**_TEXT, **_CLIP, "eos_token_id": 2, "bos_token_id": 1},
            "vision_config": {**_CLIP, "image_size": 8, "patch_size": 4},
        },
        "both",
    ),
    Family("nn.TransformerEncoder", "torch-encoder", {}, "activations"),
    Family("nn.TransformerDecoder", "torch-decoder", {}, "activations"),
    Family(
        "GPT-2",
        "GPT2LMHeadModel",
        {
            "n_embd": WIDTH,
            "n_head": HEADS,
            "n_layer": LAYERS,
            "n_inner": HIDDEN,
            "vocab_size": VOCABULARY,
            "n_positions": 32,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "use_cache": False,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
    ),
    Family("Llama", "LlamaForCausalLM", _LLAMA),
    Family("Mistral", "MistralForCausalLM", _LLAMA),
    Family("Qwen2", "Qwen2ForCausalLM", _LLAMA),
    Family("ViT", "ViTForImageClassification", _IMAGE, "images"),
    Family(
        "Whisper",
        "WhisperForConditionalGeneration",
        {
            "d_model": WIDTH,
            "encoder_layers": LAYERS,
            "decoder_layers": LAYERS,
            "encoder_attention_heads": HEADS,
            "decoder_attention_heads": HEADS,
            "encoder_ffn_dim": HIDDEN,
            "decoder_ffn_dim": HIDDEN,
            "num_mel_bins": 4,
            "vocab_size": VOCABULARY,
            "max_source_positions": 8,
            "max_target_positions": 16,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
            "dropout": 0.0,
            "use_cache": False,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
        "sound",
    ),
    Family(
        "Falcon",
        "FalconForCausalLM",
        {
            **_TEXT,
            "num_kv_heads": GROUPS,
            "new_decoder_architecture": True,
            "ffn_hidden_size": HIDDEN,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "use_cache": False,
        },
    ),
    Family(
        "MPT",
        "MptForCausalLM",
        {
            "d_model": WIDTH,
            "n_heads": HEADS,
            "n_layers": LAYERS,
            "max_seq_len": 16,
            "vocab_size": VOCABULARY,
            "use_cache": False,
        },
        eager=True,
    ),
    Family(
        "GPT-OSS",
        "GptOssForCausalLM",
        {**_LLAMA, "head_dim": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": _ROPE},
        eager=True,
        units=("heads",),
    ),
)
"""Families whose training on several ranks equals that on one device."""

REFUSED: tuple[Family, ...] = (
    Family(
        "Mamba",
        "MambaForCausalLM",
        {
            "hidden_size": WIDTH,
            "num_hidden_layers": LAYERS,
            "vocab_size": VOCABULARY,
            "state_size": 4,
            "use_cache": False,
        },
        eager=True,
        units=(),
    ),
)
"""Families that are refused with the reason: they have no units."""
