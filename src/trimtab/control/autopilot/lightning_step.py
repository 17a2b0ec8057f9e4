"""Lightning's training step, repeated on a copy of the module.

Lightning trains through DDP's forward pass, but it is `training_step` that it wants to run: before each call it puts a
function in place of the module's `forward`, which undoes that and calls `training_step`. A copy of the module gets a
`forward` of its own that does the same, with nothing that reaches the trainer: logging does nothing, the trainer's
numbers can be read, and its optimizers, loops and strategy cannot.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import nn

from trimtab.errors import TrimtabError
from trimtab.model_state import Detached

STEP = "training_step"
LOGS = ("log", "log_dict", "print")


@dataclass(frozen=True)
class Redirection:
    """What Lightning has put in place of a module's `forward`."""

    function: FunctionType
    method: str
    forward: Callable[..., Any]
    """The module's own."""


def redirection_of(model: nn.Module) -> Redirection | None:
    """That of a module which Lightning is about to call; None for all other modules."""
    function = model.__dict__.get("forward")
    if not isinstance(function, FunctionType):
        return None
    names = inspect.getclosurevars(function).nonlocals
    if names.get("original_module") is not model or not {"method_name", "original_forward"} <= names.keys():
        return None
    return Redirection(function, names["method_name"], names["original_forward"])


def called_method(model: nn.Module) -> Callable[..., Any]:
    """What a call of the module runs: `training_step` under Lightning, otherwise `forward`.

    Raises:
        TrimtabError: a Lightning module whose step cannot be repeated.
    """
    redirection = redirection_of(model)
    if redirection is None:
        return model.forward
    name, method = type(model).__name__, redirection.method
    if method != STEP:
        raise TrimtabError(f"Lightning calls {name}.{method} where a training step was expected")
    if not getattr(model, "automatic_optimization", True):
        raise TrimtabError(f"{name} optimizes manually, so its training_step cannot be repeated")
    if method in model.__dict__:
        raise TrimtabError(f"{name}.training_step is compiled, or replaced on the module itself")
    step: Callable[..., Any] = getattr(model, method)
    return step


def copy_of(model: nn.Module) -> nn.Module:
    """A copy of a module whose calls run what calls of the module run, without effects on the trainer."""
    redirection = redirection_of(model)
    if redirection is None:
        return copy.deepcopy(model)
    model.forward = (
        redirection.forward
    )  # its copy belongs to the copy; Lightning's function would call the original
    try:
        copied = copy.deepcopy(model)
    finally:
        model.forward = redirection.function
    for own, inner in zip(model.modules(), copied.modules(), strict=True):
        if "_trainer" in inner.__dict__:
            trainer = own.__dict__["_trainer"]
            inner.__dict__["_trainer"] = None if trainer is None else TrainerValues(trainer)
            inner.__dict__.update(dict.fromkeys(LOGS, Detached()))
    copied.forward = RepeatedStep(copied, redirection.method, copied.forward)
    return copied


class TrainerValues:
    """A trainer as a repeated step sees it."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = getattr(self._trainer, name)
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if name == "logger":
            return Detached()
        if name == "loggers":
            return []
        raise TrimtabError(f"training_step uses the trainer's {name}, so it cannot be repeated")

    def __deepcopy__(self, _memo: Any) -> TrainerValues:
        return self


class RepeatedStep:
    """The `forward` of a copied Lightning module."""

    def __init__(self, model: nn.Module, method: str, forward: Callable[..., Any]) -> None:
        """`forward` is the module's own, which a step may call."""
        self._model, self._method, self._forward = model, method, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._model
        tensors = [_tensors_of(inner) for inner in model.modules()]
        model.forward = self._forward
        try:
            with _refusing_backward():
                return getattr(model, self._method)(*args, **kwargs)
        finally:
            model.forward = self
            for inner, before in zip(model.modules(), tensors, strict=True):
                # A metric's sums, say: after a pass on fake tensors they would be fake.
                for name in _tensors_of(inner).keys() - before.keys():
                    del inner.__dict__[name]
                inner.__dict__.update(before)


def _tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors among a module's attributes that are neither parameters nor buffers."""
    return {name: value for name, value in module.__dict__.items() if isinstance(value, torch.Tensor)}


@contextmanager
def _refusing_backward() -> Iterator[None]:
    def refuse(*_args: Any, **_kwargs: Any) -> None:
        raise TrimtabError("training_step runs a backward pass of its own, so it cannot be repeated")

    backward = torch.autograd.backward
    torch.autograd.backward = refuse  # `Tensor.backward` calls it, too
    try:
        yield
    finally:
        torch.autograd.backward = backward
