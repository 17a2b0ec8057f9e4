"""Small random inputs with which a model, or its layers one by one, can run."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from math import isqrt
from typing import Any

import torch
from torch import Tensor, nn

_BATCH, _LENGTH = 2, 8
_TAKE_ACTIVATIONS = (nn.Linear, nn.LayerNorm, nn.MultiheadAttention)
TORCH_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def model_examples(model: nn.Module) -> Iterator[Arguments]:
    """Arguments with which the whole model may run, the likeliest first. The same on every rank."""
    like = _like(model)
    if like is None:
        return
    if is_transformers(model):
        yield (), _transformers(model, like)
        return
    required = _required(model)
    for first in _first_inputs(model, like) if required else ():
        yield tuple(_copy(first) for _ in range(required)), {}


def layer_examples(layer: nn.Module) -> Iterator[Arguments]:
    """Random activations for each argument of a layer, of the likeliest width first."""
    like = _like(layer)
    if like is None:
        return
    for width in _widths(layer):
        activations = (_random(like, _BATCH, _LENGTH, width) for _ in range(max(1, _required(layer))))
        yield tuple(x.requires_grad_() for x in activations), {}


def is_transformers(model: nn.Module) -> bool:
    """Whether its configuration says what it takes."""
    return hasattr(model, "main_input_name") and hasattr(model, "config")


def _required(module: nn.Module) -> int:
    """How many arguments it must be given."""
    parameters = inspect.signature(module.forward).parameters.values()
    return sum(p.default is p.empty and p.kind == p.POSITIONAL_OR_KEYWORD for p in parameters)


def _first_inputs(model: nn.Module, like: Tensor) -> Iterator[Tensor]:
    """What a model of one's own may take: tokens, images or activations; first what its first module takes."""
    known = (nn.Embedding, nn.Conv2d, *_TAKE_ACTIVATIONS)
    first = next((module for module in model.modules() if isinstance(module, known)), None)
    if isinstance(first, nn.Conv2d):
        for size in _image_sizes(model, first):
            yield _random(like, _BATCH, first.in_channels, *size)
    elif isinstance(first, nn.Embedding):
        yield from _tokens(model, like)
    for width in _widths(model):
        yield _random(like, _BATCH, _LENGTH, width).requires_grad_()
    if not isinstance(first, nn.Embedding):
        yield from _tokens(model, like)


def _tokens(model: nn.Module, like: Tensor) -> Iterator[Tensor]:
    """Numbers below the size of every table, of which the first may be that of the places; of types there are few."""
    sizes = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    below = min((size for size in sizes if size > 2), default=2)
    for length in (_LENGTH, _LENGTH // 2) if sizes else ():
        generator = torch.Generator().manual_seed(0)
        yield torch.randint(below, (_BATCH, length), generator=generator).to(like.device)


def _image_sizes(model: nn.Module, patches: nn.Conv2d) -> Iterator[tuple[int, int]]:
    """Sizes of images that fit the places for which the model has an entry each; a few others if it has none."""
    counts = [p.shape[-2] for p in model.parameters() if p.ndim == 3 and p.shape[0] == 1]
    counts += [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    sides = [
        isqrt(count - extra)
        for count in counts
        for extra in (0, 1, 2)
        if isqrt(count - extra) ** 2 == count - extra
    ]
    for side in dict.fromkeys([*sides, 2, 8]):
        yield side * patches.stride[0], side * patches.stride[1]


def _copy(value: Tensor) -> Tensor:
    return value.detach().clone().requires_grad_(value.requires_grad)


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
        size = getattr(vision, "image_size", 32)
        height, width = size if isinstance(size, (tuple, list)) else (size, size)
        inputs["pixel_values"] = _random(like, _BATCH, vision.num_channels, height, width)
    if "input_values" in accepted and not hasattr(config, "num_mel_bins"):
        # Sound as it is: as many samples as give a few places after the convolutions.
        samples = _LENGTH
        for kernel, stride in zip(config.conv_kernel[::-1], config.conv_stride[::-1], strict=True):
            samples = (samples - 1) * stride + kernel
        inputs["input_values"] = _random(like, _BATCH, samples)
    if "input_features" in accepted:
        inputs["input_features"] = _random(like, _BATCH, config.num_mel_bins, 2 * config.max_source_positions)
    if "encoder_hidden_states" in accepted and getattr(config, "add_cross_attention", False):
        inputs["encoder_hidden_states"] = _random(like, _BATCH, _LENGTH, config.hidden_size)
    if "use_cache" in accepted:
        inputs["use_cache"] = False
    return inputs


def _widths(layer: nn.Module) -> list[int]:
    """Widths that the activations of a layer may have: those of its first norm, attention and linear map."""
    widths: dict[type, int] = {}
    for module in layer.modules():
        if isinstance(module, nn.MultiheadAttention):
            widths.setdefault(nn.MultiheadAttention, int(module.embed_dim))
        elif isinstance(module, nn.LayerNorm):
            widths.setdefault(nn.LayerNorm, int(module.normalized_shape[-1]))
        elif isinstance(module, nn.Linear):
            widths.setdefault(nn.Linear, int(module.in_features))
    return list(dict.fromkeys(widths.values()))
