"""What autograd keeps of lowered operators in less usual places, beside what is predicted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from tests.measure.capture.models import Places
from tests.precision.test_results import kept_bytes
from tests.predict.memory.test_step_peak import measured
from torch import nn

from trimtab.api.set_precision import set_precision
from trimtab.measure.capture.capture import capture_workload
from trimtab.precision.devices import offers
from trimtab.precision_names import ATTENTION
from trimtab.predict.memory.step_peak import step_memory
from trimtab.predict.precision_patterns import with_products

if TYPE_CHECKING:
    from collections.abc import Callable

LOW = "int8" if "int8" in offers(torch.device("cpu"))["linear"] else "bf16"


class Classifier(nn.Module):
    """Layers and their loss."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers(x).flatten(1)
        return F.cross_entropy(y, torch.zeros(len(y), dtype=torch.long))


class Adapted(nn.Module):
    """A frozen layer with a small one beside it that learns."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down, self.up = nn.Linear(inputs, 4, bias=False), nn.Linear(4, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.base(x) + self.up(self.down(x))
        return y


class Turned(nn.Module):
    """A layer along the second axis."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layer = nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x.transpose(1, 2)).transpose(1, 2)
        return y


class Halves(nn.Module):
    """A layer in bf16, as some models keep."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(128, 128).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x.bfloat16()).float()
        return y


class Own(nn.Linear):
    """A layer with a forward of its own, which keeps its precision."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return input @ self.weight.t()


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "padded": (
        lambda: Classifier(
            nn.Conv2d(3, 8, 3, padding=2, padding_mode="reflect"), nn.ReLU(),
            nn.Conv2d(8, 8, 5, padding=2, padding_mode="circular"), nn.GELU(),
            nn.Conv2d(8, 4, 4, padding="same"),
        ),
        (4, 3, 8, 8),
    ),
    "sound": (
        lambda: Classifier(
            nn.Conv1d(2, 16, 3), nn.ReLU(), nn.Conv1d(16, 16, 3), nn.Tanh(), nn.Conv1d(16, 8, 3),
        ),
        (4, 2, 64),
    ),
    "adapted": (
        lambda: Classifier(Adapted(64, 128), nn.GELU(), Adapted(128, 128), nn.ReLU(), Adapted(128, 8)),
        (32, 64),
    ),
    "turned": (
        lambda: Classifier(nn.Linear(32, 32), Turned(16), nn.GELU(), Turned(16), nn.LayerNorm(32)),
        (8, 16, 32),
    ),
    "places": (lambda: Classifier(nn.Linear(64, 128), Places(), nn.Linear(128, 8)), (32, 64)),
    "halves": (
        lambda: Classifier(nn.Linear(64, 128), nn.GELU(), Halves(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 8)),
        (32, 64),
    ),
    "own": (
        lambda: Classifier(nn.Linear(64, 128), nn.GELU(), Own(128, 128), nn.GELU(), Own(128, 64), nn.Linear(64, 8)),
        (32, 64),
    ),
    "norms": (
        lambda: Classifier(
            nn.Linear(64, 128), nn.LayerNorm(128), nn.Linear(128, 128), nn.LayerNorm(128), nn.Linear(128, 8)
        ),
        (32, 64),
    ),
    "grows": (
        lambda: Classifier(
            nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(inplace=True), nn.ConvTranspose2d(16, 8, 2, stride=2),
            nn.GroupNorm(2, 8), nn.Conv2d(8, 1, 3),
        ),
        (4, 3, 8, 8),
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("low", list(dict.fromkeys(("bf16", "fp16", LOW))))
@pytest.mark.parametrize("name", MODELS)
def test_it_is_as_much_as_predicted(name: str, low: str) -> None:
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model, batch = make(), (torch.randn(shape),)
    workload = capture_workload(model, batch)
    assert step_memory(workload).activations == pytest.approx(kept_bytes(model, batch, False), rel=0.03)
    names = [name for name in workload.settings if not name.endswith(ATTENTION)]
    choices: list[dict[str, Any]] = [
        {"?*": low},
        dict.fromkeys(names[::2], low),
        dict.fromkeys(names[1::2], low),
    ]
    for patterns in choices:
        set_precision(model, patterns)
        predicted = step_memory(workload, with_products(workload, patterns)).activations
        assert predicted == pytest.approx(kept_bytes(model, batch, False), rel=0.03), patterns
        set_precision(model, {})


def test_a_gradient_in_fp32_counts_before_it_is_cast_to_the_type_of_a_lowered_head() -> None:
    torch.manual_seed(0)
    model, batch = Classifier(nn.Linear(32, 4096)), (torch.randn(256, 32),)
    workload = capture_workload(model, batch)
    set_precision(model, {"*": "bf16"})
    predicted = step_memory(workload, with_products(workload, {"*": "bf16"}))
    assert (predicted.phase, predicted.operator) == ("backward", "log_softmax")
    assert predicted.peak == pytest.approx(measured(model, batch, None), rel=0.03)
