"""Small random inputs with which a model, or its layers one by one, can run."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

_BATCH, _LENGTH = 2, 8
TORCH_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def example_calls(model: nn.Module) -> Iterator[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]:
    """Modules that together run every repeated layer, each with arguments. The same on every rank."""
    if hasattr(model, "main_input_name") and hasattr(model, "config"):
        like = _like(model)
        if like is not None:
            yield model, (), _transformers(model, like)
        return
    for layer in repeated_layers(model).values():
        like, width = _like(layer), _width(layer)
        if like is None or width is None:
            continue
        parameters = inspect.signature(layer.forward).parameters.values()
        required = [p for p in parameters if p.default is p.empty and p.kind == p.POSITIONAL_OR_KEYWORD]
        activations = (_random(like, _BATCH, _LENGTH, width) for _ in range(max(1, len(required))))
        yield layer, tuple(x.requires_grad_() for x in activations), {}


def repeated_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of a model, by name: the elements of its outermost lists of modules; the model if it has none."""
    layers: dict[str, nn.Module] = {}
    for path, container in model.named_modules():
        if any(path == name or path.startswith(f"{name}.") for name in layers):
            continue
        if is_repeating(container):
            layers.update({f"{path}.{name}".lstrip("."): child for name, child in container.named_children()})
        elif isinstance(container, TORCH_LAYERS):
            layers[path] = container
    return layers or {"": model}


def is_repeating(container: nn.Module) -> bool:
    """Whether this is a list of repeated layers."""
    if isinstance(container, nn.ModuleList):
        return True
    if not isinstance(container, nn.Sequential):
        return False
    kinds = [type(child) for child in container if list(child.children())]
    return len(set(kinds)) < len(kinds)


def _like(module: nn.Module) -> Tensor | None:
    """A parameter with the type and device of the module's activations."""
    real = all(type(p.data) is Tensor and p.device.type != "meta" for p in module.parameters())
    return next((p for p in module.parameters() if p.is_floating_point()), None) if real else None


def _random(like: Tensor, *shape: int) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return values.to(like.device, like.dtype)


def _transformers(model: Any, like: Tensor) -> dict[str, Any]:
    """Arguments of a transformers model, from its configuration."""
    config = model.config
    text = getattr(config, "text_config", config)
    vision = getattr(config, "vision_config", config)
    accepted = inspect.signature(model.forward).parameters
    inputs: dict[str, Any] = {}

    def tokens(below: int) -> Tensor:
        most = getattr(text, "max_position_embeddings", None) or -1  # -1: any number
        length = min(_LENGTH, most) if most > 0 else _LENGTH
        generator = torch.Generator().manual_seed(0)
        return torch.randint(below, (_BATCH, length), generator=generator).to(like.device)

    if "input_ids" in accepted:
        inputs["input_ids"] = tokens(text.vocab_size)
    if "decoder_input_ids" in accepted and getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = tokens(config.vocab_size)
    if "pixel_values" in accepted:
        size = vision.image_size
        height, width = size if isinstance(size, (tuple, list)) else (size, size)
        inputs["pixel_values"] = _random(like, _BATCH, vision.num_channels, height, width)
    if "input_features" in accepted:
        inputs["input_features"] = _random(like, _BATCH, config.num_mel_bins, 2 * config.max_source_positions)
    if "encoder_hidden_states" in accepted and getattr(config, "add_cross_attention", False):
        inputs["encoder_hidden_states"] = _random(like, _BATCH, _LENGTH, config.hidden_size)
    if "use_cache" in accepted:
        inputs["use_cache"] = False
    return inputs


def _width(layer: nn.Module) -> int | None:
    """Width of the activations that enter a layer: that of its first norm or linear map."""
    for module in layer.modules():
        if isinstance(module, nn.MultiheadAttention):
            return int(module.embed_dim)
        if isinstance(module, nn.LayerNorm):
            return int(module.normalized_shape[-1])
        if isinstance(module, nn.Linear):
            return int(module.in_features)
    return None
