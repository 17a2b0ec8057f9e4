"""Models by name or `module:function`, as the commands take them."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trimtab.errors import TrimtabError
from trimtab.measure.capture.capture import capture_or_run
from trimtab.measure.fingerprint import fingerprint
from trimtab.models.gpt import Gpt
from trimtab.models.spec import ModelSpec, load_model

META = torch.device("meta")


class ByKeyword(nn.Module):
    """Called with keywords only, returns an object with a loss, and drops layers, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.layerdrop = nn.Linear(4, 4), 0.5

    def forward(self, *, inputs: torch.Tensor, labels: torch.Tensor, scale: float = 1.0) -> Any:
        class Output:
            loss = ((self.layer(inputs) - labels) * scale).square().mean()

        return Output


def make() -> Any:
    return ByKeyword(), {"inputs": torch.ones(4, 4), "labels": torch.zeros(4, 4), "scale": 2.0}


def fails() -> Any:
    class Fails(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            raise KeyError("the model's own mistake")

    return Fails(4, 4), torch.ones(2, 4)


def test_a_batch_of_keywords_is_resized_and_captured(capfd: pytest.CaptureFixture[str]) -> None:
    spec = load_model(f"{__name__}:make", torch.device("cpu"))
    assert isinstance(spec.batch, dict)
    batch = spec.batch_of(6)
    assert isinstance(batch, dict)
    assert batch["inputs"].shape == (6, 4)
    assert batch["scale"] == 2.0
    assert spec.loss_of(spec.model(**batch)).requires_grad
    assert spec.model.layerdrop == 0.0
    assert "layerdrop is 0 here" in capfd.readouterr().err
    workload, ran = capture_or_run(spec)
    assert not ran
    assert any(operator.setting == "layer" for operator in workload.operators)


def test_a_nested_batch_is_resized_and_what_is_no_sample_stays() -> None:
    batch = (
        {"tokens": torch.arange(4), "more": [torch.zeros(4, 2), 7]},
        torch.zeros(8, 8),
        torch.tensor(1.0),
    )
    batch_of: Any = ModelSpec(name="own", model=nn.Identity(), batch=batch).batch_of
    named, mask, scale = batch_of(6)
    assert named["tokens"].tolist() == [0, 1, 2, 3, 0, 1]
    assert named["more"][0].shape == (6, 2)
    assert named["more"][1] == 7
    assert mask.shape == (8, 8)
    assert scale.dim() == 0


def frozen() -> Any:
    return nn.Linear(4, 4).requires_grad_(False), torch.ones(2, 4), lambda y: y.sum()


def sparse() -> Any:
    return (
        nn.Sequential(nn.Embedding(4, 4, sparse=True)),
        torch.zeros(2, 3, dtype=torch.int64),
        lambda y: y.sum(),
    )


@pytest.mark.parametrize(
    ("name", "words"),
    [("frozen", "no parameter of the model requires a gradient"), ("sparse", "0 has sparse gradients")],
)
def test_a_model_whose_steps_cannot_be_measured_is_refused(name: str, words: str) -> None:
    with pytest.raises(TrimtabError, match=words):
        load_model(f"{__name__}:{name}", torch.device("cpu"))


def test_a_model_that_fails_names_its_own_mistake_first() -> None:
    spec = load_model(f"{__name__}:fails", torch.device("cpu"))
    with pytest.raises(
        TrimtabError, match=r"failed: KeyError: .*the model's own mistake.*test_spec\.py, line"
    ):
        capture_or_run(spec)


def test_named_models_are_the_bare_ones_of_transformers() -> None:
    import transformers

    with META:
        bare = transformers.GPT2LMHeadModel(transformers.GPT2Config())
    assert fingerprint(load_model("gpt2", META).model) == fingerprint(bare)
    assert isinstance(load_model("bert", META).model, transformers.BertForSequenceClassification)


def test_gpt_is_the_model_of_the_example() -> None:
    knobs = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "gpt.py"))
    with META:
        example = knobs["Gpt"](**{name: knobs[name] for name in ("context", "width", "layers", "heads")})
    named: ModelSpec = load_model("gpt", META)
    assert type(example) is Gpt
    assert fingerprint(named.model) == fingerprint(example)
