"""Models that are not stacks of linear layers, trained through `set_precision`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.requirements import requires
from torch import nn

from trimtab.api.set_precision import set_precision
from trimtab.errors import TrimtabError
from trimtab.precision.devices import offers
from trimtab.precision.setting import precisions_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LOW = "int8" if "int8" in offers(torch.device("cpu"))["linear"] else "bf16"
STEPS = 6
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}


def images() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(16, 3, 16, 16), torch.randint(4, (16,))


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(64, (8, 12))
    return ids, ids


class Transformer(nn.Module):
    """A model of `transformers` that returns its loss."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(inputs, labels=labels).loss
        return loss


class Classifier(nn.Module):
    """A stack whose last layer says which class it is."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.layers(x), y)


class Recurrent(nn.Module):
    """An embedding, two recurrent layers and a head over every token."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.lstm = nn.Embedding(64, 32), nn.LSTM(32, 32, num_layers=2, batch_first=True)
        self.mix, self.cell, self.head = nn.Linear(32, 32), nn.GRUCell(32, 32), nn.Linear(32, 64)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x, _ = self.lstm(self.mix(self.table(ids)))
        last = self.cell(F.relu(self.mix(x[:, -1])))
        return F.cross_entropy(self.head(x + last[:, None]).flatten(0, 1), labels.flatten())


def _transformers(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        t: Any = transformers
        if name == "bert":
            config = t.BertConfig(**SIZES, vocab_size=64, num_labels=64)
            return Transformer(t.BertForTokenClassification(config))
        if name == "vit":
            return Transformer(
                t.ViTForImageClassification(t.ViTConfig(**SIZES, image_size=16, patch_size=4, num_labels=4))
            )
        if name == "llama":
            config = t.LlamaConfig(**SIZES, vocab_size=64, num_key_value_heads=1, use_cache=False)
            return Transformer(t.LlamaForCausalLM(config))
        if name == "t5":
            config = t.T5Config(
                d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, vocab_size=64,
                decoder_start_token_id=0, use_cache=False,
            )  # fmt: skip
            return Transformer(t.T5ForConditionalGeneration(config))
        config = t.ResNetConfig(
            embedding_size=8, hidden_sizes=[16, 32], depths=[1, 2], layer_type="bottleneck", num_labels=4
        )
        return Transformer(t.ResNetForImageClassification(config))

    return make


def vgg() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 16), (16, 32)):
        layers += [
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
        ]
    return Classifier(*layers, nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4))


def decoder() -> nn.Module:
    """Attention in one call and a convolution that grows: left alone, between layers that are lowered."""
    return Classifier(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(8, 8, 2, stride=2), nn.AvgPool2d(4),
        nn.Flatten(2), nn.TransformerEncoderLayer(64, 2, 64, dropout=0.0, batch_first=True), nn.Flatten(),
        nn.Linear(512, 4),
    )  # fmt: skip


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[torch.Tensor, ...]]]] = {
    "resnet": (_transformers("resnet"), images),
    "vgg": (vgg, images),
    "vit": (_transformers("vit"), images),
    "bert": (_transformers("bert"), tokens),
    "llama": (_transformers("llama"), tokens),
    "t5": (_transformers("t5"), tokens),
    "lstm": (Recurrent, tokens),
    "decoder": (decoder, images),
}


def losses(name: str, low: str | None) -> tuple[list[float], nn.Module]:
    """Of some steps on one batch, with the same dropout whatever the precision."""
    torch.manual_seed(0)
    make, batch_of = MODELS[name]
    model, batch = make().train(), batch_of()
    if low is not None:
        set_precision(model, {"?*": low})
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    values = []
    for step in range(STEPS):
        torch.manual_seed(step)
        loss = model(*batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert loss.dtype == torch.float32
        values.append(float(loss.detach()))
    return values, model


@requires(modules=["transformers"])
@pytest.mark.parametrize("low", list(dict.fromkeys(("bf16", LOW))))
@pytest.mark.parametrize("name", list(MODELS))
def test_it_learns_as_in_fp32(name: str, low: str) -> None:
    plain, _ = losses(name, None)
    lowered, model = losses(name, low)
    assert precisions_of(model)
    fall = plain[0] - plain[-1]
    assert fall > 0.05
    assert lowered != plain
    assert abs(lowered[0] - plain[0]) < 0.05 * plain[0]
    assert plain[0] - lowered[-1] > 0.7 * fall
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.fixture
def _messages(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    from trimtab.environment import logger

    log = logger()
    log.propagate = True
    caplog.set_level(logging.INFO, "trimtab")
    yield
    log.propagate = False


@pytest.mark.usefixtures("_messages")
def test_what_is_left_alone_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = Recurrent()
    set_precision(model, {"*": "bf16"})
    assert "lstm" not in precisions_of(model)
    assert "lstm is a torch.nn.LSTM, which computes all its steps in one call" in caplog.text
    assert "cell is a torch.nn.GRUCell" in caplog.text
    caplog.clear()
    set_precision(model, {"head": "bf16"})
    assert not caplog.text
    set_precision(decoder(), {"*": "bf16", "*/attention": "bf16"})
    for text in (
        "layers.2 is a torch.nn.ConvTranspose2d",
        "layers.5.self_attn is a torch.nn.MultiheadAttention",
    ):
        assert text in caplog.text


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("layers.2", "layers.2 is a torch.nn.ConvTranspose2d, and transposed convolutions are not supported"),
        ("layers.5.self_attn", "layers.5.self_attn is a torch.nn.MultiheadAttention"),
        ("*.out_proj", "layers.5.self_attn is a torch.nn.MultiheadAttention"),
    ],
)
def test_what_cannot_be_set_is_refused_by_name(pattern: str, message: str) -> None:
    with pytest.raises(TrimtabError, match=message):
        set_precision(decoder(), {pattern: "bf16"})


class Halved(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return super().forward(input) / 2


def with_another_forward() -> nn.Linear:
    module = nn.Linear(8, 8)
    forward = module.forward
    module.forward = lambda input: forward(input) / 2  # type: ignore[method-assign]  # noqa: A006
    return module


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Halved(8, 8), "0 is of class Halved, whose class has a forward of its own"),
        (with_another_forward, "0 is of class Linear, whose forward was replaced"),
        (lambda: nn.Embedding(8, 8, max_norm=1.0), "0 is of class Embedding, and its max_norm, sparse"),
        (lambda: nn.Bilinear(8, 8, 8), "0 is a torch.nn.Bilinear, which is not supported"),
    ],
)
def test_what_only_looks_like_an_operator_is_refused_by_name(
    make: Callable[[], nn.Module], message: str
) -> None:
    with pytest.raises(TrimtabError, match=message):
        set_precision(nn.Sequential(make(), nn.Linear(8, 8)), {"0": "bf16"})


@pytest.mark.parametrize("low", list(dict.fromkeys(("bf16", "fp16", LOW))))
def test_a_model_on_the_meta_device_has_shapes_and_trains_once_it_has_values(low: str) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv1d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5))
    set_precision(model, {"?*": low})
    y = model(torch.empty(4, 3, 10, device="meta"))
    assert y.shape == (4, 5)
    y.sum().backward()
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
        parameter.grad = None
    model(torch.randn(4, 3, 10)).square().mean().backward()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
