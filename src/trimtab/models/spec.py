"""Models by name, as for `--model` of `probe`, `plan` and `simulate`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from trimtab.environment import logger
from trimtab.errors import TrimtabError


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model and one sample batch, on the device where they were created."""

    name: str
    model: nn.Module
    batch: tuple[Any, ...] | dict[str, Any]
    """The model's arguments, by position or by keyword. Axis 0 is the batch; tensors inside
    may be nested, and those of another length are no samples: see `resized`."""

    loss: Callable[[Any], torch.Tensor] | None = None
    """Computes the scalar loss from the model's output; None if the output is the loss."""

    def loss_of(self, output: Any) -> torch.Tensor:
        loss = self.loss(output) if self.loss is not None else getattr(output, "loss", output)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise TrimtabError(
                f"{self.name}: the model returns {type(loss).__name__} instead of a scalar loss; let the function "
                "return (model, batch, loss), with a loss that computes a scalar from the model's output"
            )
        return loss

    def batch_of(self, samples: int) -> tuple[Any, ...] | dict[str, Any]:
        """The batch with another number of samples: rows of the sample batch, repeated."""
        return resized(self.batch, samples)  # type: ignore[no-any-return]  # of the batch's own form


def resized(batch: Any, samples: int) -> Any:
    """A batch, however it is nested, with another number of samples: its rows, repeated.

    A tensor whose axis 0 is not as long as the batch (a mask, positions) belongs to all samples and stays as it is.
    """
    old = batch_size(batch)

    def sized(value: Any) -> Any:
        grows = isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == old
        return value[torch.arange(samples, device=value.device) % old] if grows and samples != old else value

    return tree_map(sized, batch)


def batch_size(batch: Any) -> int:
    """Samples of a batch: rows of its first tensor with an axis.

    Raises:
        TrimtabError: it has no such tensor, or no row.
    """
    for value in tree_leaves(batch):
        if isinstance(value, torch.Tensor) and value.dim() and len(value):
            return len(value)
    raise TrimtabError("the sample batch has no tensor with an axis; axis 0 is the batch")


NAMES = ("gpt", "gpt2", "bert", "vit", "resnet50")


def load_model(text: str, device: torch.device, *, samples: int = 4) -> ModelSpec:
    """A model of `NAMES`, or the result of ``module:function``: (model, batch) or (model, batch, loss).

    Raises:
        TrimtabError: there is no such model.
    """
    if ":" in text:
        return _from_function(text, device)
    if text not in NAMES:
        raise TrimtabError(
            f"there is no model {text!r}; choose {', '.join(NAMES)}, or write module:function for your own"
        )
    with torch.device(device):
        model, batch = _named(text, samples)
    return ModelSpec(name=text, model=model, batch=batch)


def _from_function(text: str, device: torch.device) -> ModelSpec:
    module, _, name = text.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as with `python -m`
    try:
        function = getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        raise TrimtabError(
            f"{text}: there is no module {error.name!r}; run this where it can be imported"
        ) from None
    except AttributeError:
        raise TrimtabError(f"{text}: module {module} has no {name!r}") from None
    with torch.device(device):
        made = function()
    if not (isinstance(made, tuple) and len(made) in (2, 3) and isinstance(made[0], nn.Module)):
        raise TrimtabError(
            f"{text}: must return (model, batch) or (model, batch, loss); got {type(made).__name__}"
        )
    batch = made[1]
    if isinstance(batch, Mapping):  # also a tokenizer's BatchEncoding
        batch = dict(batch)
    elif not isinstance(batch, tuple):
        batch = (batch,)
    _refuse_untrainable(text, made[0])
    _keep_layers(text, made[0])
    return ModelSpec(name=text, model=made[0], batch=batch, loss=made[2] if len(made) == 3 else None)


def _refuse_untrainable(name: str, model: nn.Module) -> None:
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise TrimtabError(
            f"{name}: no parameter of the model requires a gradient, so there is no step to measure or plan; return "
            "the model as it is trained"
        )
    for path, module in model.named_modules():
        if getattr(module, "sparse", False) and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            raise TrimtabError(
                f"{name}: {path or 'the model'} has sparse gradients, whose exchange and optimizer are not "
                "measured; create it with sparse=False"
            )


def _keep_layers(name: str, model: nn.Module) -> None:
    """A step is described with all layers: which of them are dropped differs from step to step."""
    dropping = [module for module in model.modules() if getattr(module, "layerdrop", 0)]
    for module in dropping:
        module.layerdrop = 0.0  # type: ignore[assignment]  # a number
    if dropping:
        logger().info("%s: layerdrop is 0 here: steps are measured and predicted with all layers", name)


def _named(name: str, samples: int) -> tuple[nn.Module, tuple[Any, ...] | dict[str, Any]]:
    if name == "gpt":
        from trimtab.models.gpt import Gpt

        model: nn.Module = Gpt(width=128, layers=4, heads=4, context=128)  # the sizes of examples/gpt.py
        return model, (torch.zeros(samples, 129, dtype=torch.int64),)
    import transformers as t

    if name == "gpt2":
        ids = torch.zeros(samples, 512, dtype=torch.int64)
        return t.GPT2LMHeadModel(t.GPT2Config()), {"input_ids": ids, "labels": ids}
    labels = torch.zeros(samples, dtype=torch.int64)
    if name == "bert":
        ids = torch.zeros(samples, 128, dtype=torch.int64)
        return t.BertForSequenceClassification(t.BertConfig()), {"input_ids": ids, "labels": labels}
    config: Any = t.ViTConfig() if name == "vit" else t.ResNetConfig()
    config.num_labels = 1000
    kind: Any = t.ViTForImageClassification if name == "vit" else t.ResNetForImageClassification
    return kind(config), {"pixel_values": torch.zeros(samples, 3, 224, 224), "labels": labels}


class LossOnly(nn.Module):
    """A model of `transformers` whose forward pass returns its loss; without labels, that of predicting the inputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        loss: torch.Tensor = self.model(inputs, labels=inputs if labels is None else labels).loss
        return loss
