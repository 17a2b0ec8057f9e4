"""An observed step stands for the script's loss: the same gradients, at any batch size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from trimtab.control.autopilot import observed_step
from trimtab.control.autopilot.observed_step import JobSpec, ObservedStep
from trimtab.errors import TrimtabError


class Classifier(nn.Module):
    """Called with keywords, and returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0, **others: Any) -> dict[str, torch.Tensor]:
        return {"logits": self.layer(x) * scale, "inputs": x}


def observed(samples: int = 6) -> tuple[Classifier, ObservedStep, torch.Tensor]:
    torch.manual_seed(0)
    model, x, y = Classifier(), torch.randn(samples, 4), torch.randint(0, 3, (samples,))
    step = ObservedStep.of_call(model, (x,), {"scale": 2.0, "mask": None})
    output = model(x, scale=2.0)
    step.follow_output(output)
    F.cross_entropy(output["logits"], y).backward()
    assert model.layer.weight.grad is not None
    return model, step, model.layer.weight.grad


def test_its_gradients_are_those_of_the_scripts_loss() -> None:
    model, step, expected = observed()
    assert step.batch.keys() == {"x", "scale", "mask"}
    assert (step.samples, step.autocast) == (6, None)
    model.zero_grad()
    step.loss_of(model(**step.batch)).backward()
    torch.testing.assert_close(model.layer.weight.grad, expected)


def test_other_batch_sizes_repeat_its_rows() -> None:
    model, step, _ = observed()
    spec = JobSpec(name="job", model=model, batch=step.batch, step=step)
    batch = spec.batch_of(9)
    assert torch.equal(batch["x"][6:], step.batch["x"][:3])
    assert batch["scale"] == 2.0
    spec.loss_of(model(**batch)).backward()


def test_rows_of_a_large_output_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observed_step, "MOST_GRADIENT_BYTES", 24)  # two rows of three floats
    model, step, _ = observed()
    assert [len(gradient) for gradient in step.gradients.values()] == [2]
    step.loss_of(model(**step.batch)).backward()


def test_autocast_is_seen() -> None:
    model, x = Classifier(), torch.randn(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert ObservedStep.of_call(model, (x,), {}).autocast == "bf16"


def test_a_step_without_a_gradient_is_named() -> None:
    model, x = Classifier(), torch.randn(2, 4)
    step = ObservedStep.of_call(model, (x,), {})
    with pytest.raises(TrimtabError, match="no output of the model had a gradient"):
        step.loss_of(model(x))
    with pytest.raises(TrimtabError, match="without a tensor"):
        _ = ObservedStep(batch={"flag": True}, autocast=None).samples


class Sink(torch.autograd.Function):
    """One operation for all outputs, as DDP has it: those that the loss does not use have no gradient."""

    @staticmethod
    def forward(ctx: Any, *outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(output.clone() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradients


def test_an_output_that_the_loss_does_not_use() -> None:
    model, x = Classifier(), torch.randn(6, 4)
    step = ObservedStep.of_call(model, (x,), {})
    logits = model(x)["logits"]
    outputs = Sink.apply(logits.mean(), logits)  # type: ignore[no-untyped-call]
    step.follow_output(outputs)
    outputs[0].backward()
    assert {position: float(gradient) for position, gradient in step.gradients.items()} == {0: 1.0}
