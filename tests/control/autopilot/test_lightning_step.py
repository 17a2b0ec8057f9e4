"""Lightning's training step is repeated on a copy: by name, without the trainer, or not at all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lightning
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies.strategy import _ForwardRedirection
from torch import nn

from trimtab.control.autopilot.lightning_step import RepeatedStep, copy_of, redirection_of
from trimtab.control.autopilot.observed_step import JobSpec, ObservedStep
from trimtab.errors import TrimtabError
from trimtab.measure.capture.capture import capture_or_run


class Module(lightning.LightningModule):  # type: ignore[misc]  # Lightning is typed only in part
    """Logs, counts, keeps a sum as metrics do, and calls its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 3)
        self.sizes: list[int] = []
        self.seen = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.net(x)
        return result

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> dict[str, torch.Tensor]:
        targets = batch.pop("y")
        loss = F.cross_entropy(self(batch["x"]), targets)
        self.sizes.append(len(targets))
        self.seen = self.seen + loss.detach()
        self.last = loss.detach()
        self.log("loss", loss, sync_dist=True)
        self.print(batch_idx)
        self.logger.experiment.add_scalar("loss", float(self.global_step))
        return {"loss": loss}


class OwnBackward(Module):
    def training_step(self, batch: dict[str, torch.Tensor], _index: int) -> dict[str, torch.Tensor]:
        loss = F.cross_entropy(self(batch["x"]), batch["y"])
        loss.backward(retain_graph=True)
        return {"loss": loss}


class OwnOptimizer(Module):
    def training_step(self, batch: dict[str, torch.Tensor], _index: int) -> dict[str, torch.Tensor]:
        self.trainer.optimizers[0].step()
        return {"loss": F.cross_entropy(self(batch["x"]), batch["y"])}


class Wrapper(nn.Module):
    """Stands for DDP; its hook runs where the autopilot's do."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def trainer() -> Any:
    """What a step sees of a real one."""
    found = SimpleNamespace(calls=0, global_step=7, barebones=True, is_global_zero=False, optimizers=[1])
    found.logger = SimpleNamespace(
        experiment=SimpleNamespace(add_scalar=lambda *_: setattr(found, "calls", 1))
    )
    return found


def observed(module: Module) -> tuple[ObservedStep, Any]:
    """One step as Lightning runs it, and the copy that is timed before the next."""
    wrapper, redirect = Wrapper(module), _ForwardRedirection()
    found: list[Any] = []

    def before(_wrapper: nn.Module, args: Any, kwargs: Any) -> None:
        found.append(ObservedStep.of_call(module, args, kwargs))
        found.append(copy_of(module))

    wrapper.register_forward_pre_hook(before, with_kwargs=True)
    module._trainer = trainer()
    batch = {"x": torch.randn(6, 4), "y": torch.randint(0, 3, (6,))}
    output = redirect(wrapper, module, "training_step", batch, 2)
    step, copied = found
    step.follow_output(output)
    output["loss"].backward()
    return step, copied


@pytest.mark.filterwarnings("ignore")
def test_the_copy_runs_the_training_step_and_leaves_no_trace() -> None:
    torch.manual_seed(0)
    module = Module()
    step, copied = observed(module)
    assert step.batch.keys() == {"batch", "batch_idx"}
    assert step.samples == 6
    assert redirection_of(module) is None, "Lightning has put forward back"
    before, calls = module.seen.clone(), module.trainer.calls
    spec = JobSpec(name="job", model=copied, batch=step.batch, step=step)
    workload, _ = capture_or_run(spec, sizes=(2, 6))
    assert any("net" in name for name in workload.settings), workload.settings
    spec.loss_of(copied(**spec.batch_of(6))).backward()
    assert module.net.weight.grad is not None
    torch.testing.assert_close(copied.net.weight.grad, module.net.weight.grad)
    assert isinstance(copied.forward, RepeatedStep), "ready for the next call"
    assert type(copied.seen) is torch.Tensor, "no fake tensor stays"
    assert "last" not in copied.__dict__
    assert module.sizes == [6]
    assert torch.equal(module.seen, before)
    assert module.trainer.calls == calls, "nothing was logged by the copy"


def test_what_cannot_be_repeated_is_refused() -> None:
    manual = Module()
    manual.automatic_optimization = False
    with pytest.raises(TrimtabError, match="Module optimizes manually"):
        observed(manual)
    compiled: Any = Module()
    compiled.training_step = lambda *_: None
    with pytest.raises(TrimtabError, match="compiled, or replaced"):
        observed(compiled)
    for kind, reason in (
        (OwnBackward, "backward pass of its own"),
        (OwnOptimizer, "the trainer's optimizers"),
    ):
        module = kind()
        module._trainer = trainer()
        redirect, backward = _ForwardRedirection(), torch.autograd.backward
        wrapper, copies = Wrapper(module), list[Any]()
        wrapper.register_forward_pre_hook(lambda _wrapper, _args, m=module, c=copies: c.append(copy_of(m)))
        batch = {"x": torch.randn(6, 4), "y": torch.randint(0, 3, (6,))}
        if kind is OwnBackward:
            redirect(wrapper, module, "training_step", batch, 0)
        else:
            with pytest.raises(AttributeError):
                redirect(wrapper, module, "training_step", batch, 0)
        with pytest.raises(TrimtabError, match=reason):
            copies[0](batch, 0)
        assert torch.autograd.backward is backward
