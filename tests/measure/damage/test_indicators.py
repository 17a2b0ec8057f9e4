"""Damage by every indicator: right, in order, and the model is left as it was."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.measure.damage.test_recorder import Twice, hooks, ids
from tests.support.requirements import requires
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trimtab.api.set_precision import set_precision
from trimtab.errors import TrimtabError
from trimtab.measure.damage.dry_run import DryRun
from trimtab.measure.damage.indicators import INDICATORS, gradient_damage, measure
from trimtab.precision.setting import precisions_of
from trimtab.precision_names import Precision

if TYPE_CHECKING:
    from tests.support.pool import Pool


class Net(nn.Module):
    """Convolutions with groups and strides, a norm that counts batches, dropout, linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, stride=2, groups=2, bias=False)
        self.along = nn.Conv1d(8, 8, 3, padding="same")
        self.drop = nn.Dropout(0.3)
        self.up = nn.Linear(72, 32)
        self.down = nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.norm(self.conv1(x)))
        x = F.gelu(self.conv2(x)).flatten(2)
        x = self.along(x).flatten(1)
        y: torch.Tensor = self.down(self.drop(F.gelu(self.up(x))))
        return y


def make() -> tuple[Net, list[tuple[torch.Tensor]]]:
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = Net()
    with torch.no_grad():  # operators that differ in how much they matter
        model.conv1.weight *= 3
        model.up.weight *= 0.3
        model.along.weight *= 2
    return model, [(torch.randn(6, 1, 8, 8, generator=generator),) for _ in range(2)]


def loss(logits: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, torch.arange(len(logits)) % 5)


@pytest.mark.parametrize("precision", ["bf16", pytest.param("int8", marks=requires(int8=True))])
def test_what_is_computed_is_what_is_measured(precision: str) -> None:
    model, batches = make()
    found = gradient_damage(model, batches, loss, precisions=[precision])
    truth = gradient_damage(model, batches, loss, precisions=[precision], indicator="measured")
    assert list(found) == list(truth)
    for name, by in truth.items():
        # Rounding to nearest is one draw and no mean.
        assert 0.4 < found[name][precision] / by[precision] < 2.5, name


@requires(int8=True)
def test_transposed_tied_repeated_and_unused_operators() -> None:
    torch.manual_seed(1)
    model = Twice()
    batches = [(ids(),), (ids().flip(0),)]
    precisions = ["fp32", "bf16", "int8"]
    found = gradient_damage(model, batches, precisions=precisions)
    truth = gradient_damage(model, batches, precisions=precisions, indicator="measured")
    assert set(found) == set(truth) == {"tokens", "mix/attention", "shared", "head", "unused"}
    assert found["unused"] == truth["unused"] == {"fp32": 0, "bf16": 0, "int8": 0}
    assert set(found["tokens"]) == set(found["mix/attention"]) == {"fp32", "bf16"}
    for name in ("tokens", "mix/attention", "shared", "head"):
        for precision in truth[name].keys() - {"fp32"}:
            assert 0.25 < found[name][precision] / truth[name][precision] < 4, (name, precision)
    assert model.head.weight is model.tokens.weight


@requires(int8=True)
@requires(modules=["transformers"])
def test_a_transformers_model_with_transposed_weights() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=31, n_positions=16, n_embd=16, n_layer=1, n_head=2))
    batch = {"input_ids": torch.randint(31, (2, 8)), "labels": torch.randint(31, (2, 8))}
    found = gradient_damage(model, [batch], precisions=["int8"])
    truth = gradient_damage(model, [batch], precisions=["int8"], indicator="measured")
    for name in ("transformer.h.0.attn.c_attn", "transformer.h.0.mlp.c_proj", "lm_head"):
        assert 0.3 < found[name]["int8"] / truth[name]["int8"] < 3, name


@requires(int8=True)
def test_damages_of_operators_add_up() -> None:
    model, batches = make()
    found = gradient_damage(model, batches, loss, precisions=["int8"])
    names = ["conv1", "conv2", "up"]
    together = []
    with DryRun(model, batches, loss, 0) as dry_run:
        plain = dry_run.gradient(0)[1]
        for seed in range(24):
            set_precision(model, dict.fromkeys(names, "int8"), seed=seed)
            error = sum(float((g - plain[n]).square().sum()) for n, g in dry_run.gradient(0)[1].items())
            together.append(error / sum(float(g.square().sum()) for g in plain.values()))
    alone = gradient_damage(model, batches[:1], loss, precisions=["int8"])
    assert sum(together) / 24 == pytest.approx(sum(alone[name]["int8"] for name in names), rel=0.5)
    assert sum(found[name]["int8"] for name in names) > 0


def _state(model: nn.Module) -> dict[str, Any]:
    return {
        "parameters": [(p, p.detach().clone(), p._version) for p in model.parameters()],
        "grads": [(p.grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()],
        "buffers": [(b, b.clone()) for b in model.buffers()],
        "modes": [m.training for m in model.modules()],
        "hooks": [(dict(m._forward_hooks), dict(m._forward_pre_hooks)) for m in model.modules()],
        "forwards": [m.__dict__.get("forward") for m in model.modules()],
        "random": torch.get_rng_state(),
    }


def _assert_same(model: nn.Module, before: dict[str, Any]) -> None:
    after = _state(model)
    for key in ("modes", "hooks", "forwards"):
        assert after[key] == before[key], key
    assert torch.equal(after["random"], before["random"])
    for (p, value, version), (q, was, old) in zip(after["parameters"], before["parameters"], strict=True):
        assert p is q
        assert version == old
        assert torch.equal(value, was)
    for (grad, value), (other, was) in zip(after["grads"], before["grads"], strict=True):
        assert grad is other
        assert grad is None or torch.equal(value, was)
    for (buffer, value), (other, was) in zip(after["buffers"], before["buffers"], strict=True):
        assert buffer is other
        assert torch.equal(value, was)


@requires(int8=True)
@pytest.mark.parametrize("indicator", INDICATORS)
@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_exactly_as_it_was(indicator: str, training: bool) -> None:
    model, batches = make()
    model.train(training)
    model.down.eval()
    loss(model(*batches[0])).backward()
    model.conv1.weight.grad = None
    model.up.weight.requires_grad_(False)
    model.register_forward_pre_hook(lambda *_: None)
    set_precision(model, {"up": "int8", "conv*": "bf16"})
    before = _state(model)
    found = gradient_damage(model, batches, loss, precisions=["bf16", "int8"], indicator=indicator)
    _assert_same(model, before)
    assert precisions_of(model)["up"] == Precision.of("int8")
    # Found in the model's own precision, whatever it is lowered to at the moment, and the same again.
    again = gradient_damage(
        set_precision(model, {}), batches, loss, precisions=["bf16", "int8"], indicator=indicator
    )
    assert again == found
    # Nothing but an error leaves early, and that leaves nothing either.
    before = _state(model)
    with pytest.raises(ZeroDivisionError):
        gradient_damage(model, batches, lambda _: 1 / 0, precisions=["int8"], indicator=indicator)  # type: ignore[arg-type, return-value]
    _assert_same(model, before)


def test_dropout_drops_the_same_in_every_pass() -> None:
    model, batches = make()
    with DryRun(model, batches, loss, 0) as dry_run:
        first, again, other = (dry_run.gradient(b)[0] for b in (0, 0, 1))
        assert first == again != other
    with DryRun(model, batches, loss, 1) as dry_run:
        assert dry_run.gradient(0)[0] != first


@requires(int8=True)
@pytest.mark.parametrize("indicator", ["variance", "measured"])
def test_batches_without_a_finite_gradient_are_passed_over(indicator: str) -> None:
    model, batches = make()
    model.eval()
    bad = (torch.full_like(batches[0][0], torch.nan),)
    both = gradient_damage(model, [batches[0], bad], loss, precisions=["int8"], indicator=indicator)
    assert all(math.isfinite(by["int8"]) and by["int8"] > 0 for by in both.values())
    with pytest.raises(TrimtabError, match="zero or not finite"):
        gradient_damage(model, [bad], loss, precisions=["int8"], indicator=indicator)


@pytest.mark.parametrize("indicator", ["variance", "measured"])
def test_beyond_a_precisions_range_damage_is_infinite(indicator: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    found = gradient_damage(
        model,
        [(torch.randn(3, 4) * 1e6,)],
        torch.Tensor.mean,
        precisions=["fp16", "bf16"],
        indicator=indicator,
    )
    assert found["0"]["fp16"] == math.inf
    assert 0 < found["0"]["bf16"] < 1


@pytest.mark.parametrize("size", [1e-12, 1e12])
def test_it_does_not_depend_on_the_size_of_the_loss(size: float) -> None:
    model, batches = make()
    plain = gradient_damage(model, batches, loss, precisions=["bf16", "int8"])
    scaled = gradient_damage(model, batches, lambda y: loss(y) * size, precisions=["bf16", "int8"])
    for name, by in plain.items():
        for precision, value in by.items():
            assert scaled[name][precision] == pytest.approx(value, rel=0.05)


def test_under_autocast_its_type_is_the_operators_own() -> None:
    model, batches = make()
    with torch.autocast("cpu", torch.bfloat16):
        found = gradient_damage(model, batches, loss, precisions=["bf16", "int8"])
    assert found["up"]["bf16"] == 0 < found["up"]["int8"]
    half = copy.deepcopy(model).bfloat16()
    batch = (batches[0][0].bfloat16(),)
    found = gradient_damage(half, [batch], lambda y: loss(y.float()), precisions=["fp32", "bf16", "int8"])
    reference = gradient_damage(model, batches[:1], loss, precisions=["int8"])
    assert found["up"]["fp32"] == found["up"]["bf16"] == 0
    assert 0.1 < found["up"]["int8"] / reference["up"]["int8"] < 10


def test_precisions_that_this_device_lacks_can_be_computed_but_not_measured() -> None:
    model, batches = make()
    found = gradient_damage(model, batches, loss, precisions=["tf32", "fp16", "bf16", "fp8"])
    for by in found.values():
        assert 0 < by["tf32"] < by["fp16"] * 2
        assert by["fp16"] < by["bf16"] < by.get("fp8", 1.0)  # convolutions have no fp8
    with pytest.raises(TrimtabError, match="does not offer fp8"):
        gradient_damage(model, batches, loss, precisions=["fp8"], indicator="measured")
    assert hooks(model) == 0


@requires(int8=True)
def test_operators_before_the_first_that_learns() -> None:
    model, batches = make()
    model.eval()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("down"))
    found = gradient_damage(model, batches, loss, precisions=["int8"])
    truth = gradient_damage(model, batches, loss, precisions=["int8"], indicator="measured")
    for name in ("conv1", "up", "down"):  # those that do not learn still disturb the one that does
        assert 0.3 < found[name]["int8"] / truth[name]["int8"] < 3, name


@requires(int8=True)
def test_the_loss_is_measured_too() -> None:
    model, batches = make()
    with DryRun(model, batches, loss, 0) as dry_run:
        changes = measure(dry_run, ["bf16", "int8"], draws=2)
    assert all(0 < change.loss < 0.1 for by in changes.values() for change in by.values())


def test_curvature_where_the_loss_is_quadratic() -> None:
    # loss = ½ ‖x wᵀ‖²: the second derivatives by each row of w are xᵀ x.
    torch.manual_seed(0)
    model, x = nn.Linear(16, 64, bias=False), torch.randn(256, 16)
    found = gradient_damage(
        model, [(x,)], lambda y: 0.5 * y.square().sum(), precisions=["bf16"], indicator="curvature"
    )
    error = (model.weight.detach().bfloat16().float() - model.weight.detach()).square().sum()
    assert found[""]["bf16"] == pytest.approx(float(0.5 * error * x.square().sum() / 16), rel=0.05)


def test_depth_grows_with_the_noise_of_the_operands() -> None:
    model, batches = make()
    model.eval()
    before = gradient_damage(model, batches, loss, precisions=["bf16", "int8"], indicator="depth")
    with torch.no_grad():
        model.up.weight[0, 0] = 100 * model.up.weight.abs().max()  # coarser steps for all of it
    after = gradient_damage(model, batches, loss, precisions=["bf16", "int8"], indicator="depth")
    assert after["up"]["int8"] / before["up"]["int8"] > 1.2
    assert gradient_damage(
        model, batches, loss, precisions=["int8"], indicator="random", seed=1
    ) != gradient_damage(model, batches, loss, precisions=["int8"], indicator="random", seed=2)


class Restless(nn.Module):
    """Sends another number of rows to its layer in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        y: torch.Tensor = self.layer(x[self.count % 2 :]).square().mean()
        return y


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"indicator": "best"}, "there is no indicator 'best'; choose variance"),
        ({"precisions": ["int4"]}, "there is no precision 'int4'"),
        ({"batches": []}, "there are no batches"),
        ({"loss": None}, "not a scalar loss; pass loss="),
        ({"loss": lambda _: torch.ones(())}, "does not depend on any parameter"),
        ({"model": nn.Flatten()}, "no parameter of this model needs a gradient"),
        ({"model": nn.Linear(4, 4, device="meta")}, "not all parameters"),
        ({"model": torch.compile(nn.Linear(4, 4))}, "compiled"),
    ],
)
def test_mistakes_are_explained(change: dict[str, Any], message: str) -> None:
    model, batches = make()
    given: dict[str, Any] = {
        "model": model,
        "batches": batches,
        "loss": loss,
        "precisions": ["int8"],
        **change,
    }
    with pytest.raises(TrimtabError, match=message):
        gradient_damage(given.pop("model"), given.pop("batches"), given.pop("loss"), **given)


def test_a_model_that_chooses_its_way_by_the_values_is_refused() -> None:
    with pytest.raises(TrimtabError, match="shapes in layer change when the weights move a little"):
        gradient_damage(Restless(), [(torch.randn(9, 4),)], precisions=["int8"])


def _alone() -> tuple[float, float]:
    model, batches = make()
    ddp = DistributedDataParallel(model)
    found = 0.0
    if dist.get_rank() == 0:  # the other rank is not asked: nothing may wait for it
        found = gradient_damage(ddp, batches, loss, precisions=["int8"])["up"]["int8"]
    loss(ddp(*batches[0])).backward()
    assert model.up.weight.grad is not None
    return found, float(model.up.weight.grad.square().sum())


def test_one_rank_alone_under_ddp(ranks: Pool) -> None:
    model, batches = make()
    results = ranks(2, _alone)
    assert results[0][0] == pytest.approx(
        gradient_damage(model, batches, loss, precisions=["int8"])["up"]["int8"], rel=0.2
    )
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-5)
