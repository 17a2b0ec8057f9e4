"""The study of verdicts: what arrives is what the real reductions leave, and losses are judged as it says."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from benchmarks.studies.bit_methods import CANARY, OTHER_DATA, WEIGHT_CANARY, methods
from benchmarks.studies.bit_verdicts import Job, merged, rows_of, train
from benchmarks.studies.simulated_wire import (
    AdaptiveBlocks,
    Blocks,
    Exact,
    Largest,
    LowRank,
    nearest,
    orthonormal,
    short_ranges,
)
from benchmarks.studies.stacked_runs import MODELS, TINY, Runs, adamw, sgd

from trimtab.codec import Block, TopK
from trimtab.codec.powersgd import orthonormal as by_gram_schmidt
from trimtab.planning.compression.family import ADAMW, BITS_FEEDBACK, SGD

if TYPE_CHECKING:
    from collections.abc import Iterator

SHAPES = {"a": torch.Size((64, 32)), "b": torch.Size((32, 96))}
VALUES = sum(shape.numel() for shape in SHAPES.values())
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _gradients(runs: int = 2, workers: int = 4, seed: int = 0) -> torch.Tensor:
    return torch.randn(runs, workers, VALUES, generator=torch.Generator().manual_seed(seed)) / workers


def _blocks(bits: int, **options: Any) -> Blocks:
    return Blocks(shapes=SHAPES, seeds=[5, 6], workers=4, bits=bits, **options)


NO_LOSSES = torch.zeros(2, 4)


def test_a_value_is_rounded_by_its_worker_and_as_a_sum_by_its_owner() -> None:
    gradients = _gradients()
    sent = _blocks(3, stochastic=False).reduce(gradients, 0, NO_LOSSES)
    codec = Block(bits=3, stochastic=False)

    def through(values: torch.Tensor) -> torch.Tensor:
        return codec.decode(codec.encode(values), values.shape, values.dtype)

    # 5 blocks of 1024 among 4 owners: the first three own two, two and one.
    cuts = [0, 2048, 4096, VALUES, VALUES]
    expected = torch.zeros(VALUES)
    for name_cut in range(0, VALUES, 1024):
        span = slice(name_cut, name_cut + 1024)
        owner = next(w for w in range(4) if cuts[w] <= name_cut < cuts[w + 1])
        total = torch.stack(
            [gradients[0, w, span] if w == owner else through(gradients[0, w, span]) for w in range(4)]
        ).sum(0)
        expected[span] = through(total)
    torch.testing.assert_close(sent[0], expected)


def test_with_feedback_nothing_is_lost_over_the_steps() -> None:
    for options in ({"bits": 2}, {"bits": 3, "short_ranges": True, "block": 128}):
        wire = _blocks(stochastic=False, feedback=True, **options)
        given, arrived = torch.zeros(2, VALUES), torch.zeros(2, VALUES)
        for step in range(30):
            gradients = _gradients(seed=step)
            given += gradients.sum(1)
            arrived += wire.reduce(gradients, step, NO_LOSSES)
        assert wire.residual is not None
        torch.testing.assert_close(arrived + wire.residual.sum(1), given, atol=1e-4, rtol=1e-4)


def test_stochastic_rounding_differs_between_runs_steps_and_workers() -> None:
    same = torch.randn(VALUES, generator=torch.Generator().manual_seed(1)).expand(2, 4, VALUES)
    wire = _blocks(1)
    first, second = wire.reduce(same, 0, NO_LOSSES), wire.reduce(same, 1, NO_LOSSES)
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first, second)
    assert torch.equal(first, _blocks(1).reduce(same, 0, NO_LOSSES))


def test_a_reduce_scatter_rounds_once() -> None:
    gradients = _gradients()
    once = _blocks(4, twice=False).reduce(gradients, 0, NO_LOSSES) - gradients.sum(1)
    twice = _blocks(4).reduce(gradients, 0, NO_LOSSES) - gradients.sum(1)
    assert 0 < once.norm() < twice.norm()


def test_low_rank_is_exact_for_a_low_rank_sum_and_owes_the_rest() -> None:
    factors = [torch.randn(2, n, 2, generator=torch.Generator().manual_seed(n)) for n in (64, 32, 96)]
    parts = [factors[0] @ factors[1].mT, factors[1] @ factors[2].mT]
    gradients = torch.cat([part.flatten(1) for part in parts], 1)[:, None].expand(-1, 4, -1) / 4
    wire = LowRank(SHAPES, [5, 6], 4, rank=2)
    torch.testing.assert_close(wire.reduce(gradients, 0, NO_LOSSES), gradients.sum(1), atol=1e-3, rtol=1e-3)
    wire, given, arrived = LowRank(SHAPES, [5, 6], 4, rank=4), torch.zeros(2, VALUES), torch.zeros(2, VALUES)
    for step in range(10):
        gradients = _gradients(seed=step)
        given += gradients.sum(1)
        arrived += wire.reduce(gradients, step, NO_LOSSES)
    assert wire._residual is not None
    torch.testing.assert_close(arrived + wire._residual.sum(1), given, atol=1e-4, rtol=1e-4)


def test_bases_span_what_the_codec_s_own_span() -> None:
    factor = torch.randn(3, 40, 5, generator=torch.Generator().manual_seed(0))
    ours = orthonormal(factor)
    for one, own in zip(factor, ours, strict=True):
        theirs = by_gram_schmidt(one)
        torch.testing.assert_close(own @ own.T, theirs @ theirs.T, atol=1e-4, rtol=1e-4)
    assert orthonormal(torch.zeros(1, 4, 2)).eq(0).all()


def test_top_k_keeps_what_the_codec_keeps() -> None:
    gradients = _gradients(runs=1)
    sent, codec, expected = Largest(SHAPES, 4, 0.05).reduce(gradients, 0, NO_LOSSES), TopK(density=0.05), []
    for worker in gradients[0]:
        parts = [part.view(s) for part, s in zip(worker.split([2048, 3072]), SHAPES.values(), strict=True)]
        expected.append(
            torch.cat(
                [codec.decode(codec.encode(part), part.shape, part.dtype).reshape(-1) for part in parts]
            )
        )
    torch.testing.assert_close(sent[0], torch.stack(expected).sum(0))


def test_short_ranges_hold_every_value_and_cost_little() -> None:
    values = _gradients()
    rounded = short_ranges(values, 8, 128, None)
    step = (values.view(-1, 128).amax(1) - values.view(-1, 128).amin(1)) / 255
    assert ((rounded - values).abs().view(-1, 128) <= 0.52 * step[:, None]).all()
    noisy = torch.stack(
        [short_ranges(values, 2, 128, torch.Generator().manual_seed(i)) for i in range(300)]
    ).mean(0)
    assert (noisy - values).norm() < 0.1 * values.norm()


def test_bits_are_chosen_and_change_what_is_sent() -> None:
    wire = AdaptiveBlocks(_blocks(4, stochastic=False, feedback=True), BITS_FEEDBACK, SGD, CPU)
    before = wire.bytes_over_uniform4()
    for step in range(30):
        wire.reduce(_gradients(seed=step), step, NO_LOSSES)
    assert wire.bytes_over_uniform4() < before == pytest.approx(1.0)


def test_bytes_are_those_of_four_workers() -> None:
    assert _blocks(4).bytes_over_uniform4() == pytest.approx(1.0)
    assert Exact(SHAPES).bytes_over_uniform4() == pytest.approx(32 / (4 + 64 / 1024))
    shorter = _blocks(3, block=128, short_ranges=True).bytes_over_uniform4()
    assert shorter / _blocks(3, block=128).bytes_over_uniform4() == pytest.approx(52 / 56)


def test_the_optimizers_step_like_torch_s() -> None:
    start = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    for ours, theirs, options in (
        (sgd(own := start.clone(), torch.full((3,), 0.1)), torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (
            adamw(adam := start.clone(), torch.full((3,), 0.01), 8),
            torch.optim.AdamW,
            {"lr": 0.01, "weight_decay": 0.01},
        ),
    ):
        parameter = torch.nn.Parameter(start.clone())
        optimizer = theirs([parameter], **options)  # type: ignore[arg-type]
        for step in range(5):
            gradient = torch.randn(3, 8, generator=torch.Generator().manual_seed(step))
            parameter.grad = gradient.clone()
            optimizer.step()
            ours(gradient, 1.0)
        torch.testing.assert_close(own if theirs is torch.optim.SGD else adam, parameter.detach())


def test_a_worker_s_gradient_is_that_of_its_own_batch() -> None:
    for model in MODELS:
        runs = Runs(model, TINY, [1, 2], CPU)
        gradients, losses = runs.gradients(runs.flat, 3, [1, 1], 2)
        row = runs.flat[1].clone().requires_grad_()
        batch = tuple(part[1] for part in runs._data.batch(3, 1, 2))
        loss = runs._loss(row, batch)
        loss.backward()
        torch.testing.assert_close(losses[1, 1], loss.detach())
        torch.testing.assert_close(gradients[1, 1], row.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("optimizer", [SGD, ADAMW])
def test_all_methods_train_and_are_judged(optimizer: str) -> None:
    outcome = train(Job(model="llama", optimizer=optimizer, seeds=(1, 2), steps=4, lr=1e-3), TINY)
    assert list(outcome["losses"]) == list(methods(optimizer, 4))
    table = merged([outcome])
    assert {row["method"] for row in table.rows} == set(outcome["losses"])
    assert {"model", "optimizer", "bytes_over_uniform4", "codec", "gaps", "worse"} <= table.rows[0].keys()
    bytes_of = outcome["bytes_over_uniform4"]
    assert bytes_of["FSDP2: gradients 4, weights 8"] < 0.5 * bytes_of["FSDP2: gradients 4"]


def test_learning_rates_are_chosen_with_a_seed_of_their_own() -> None:
    outcome = train(Job(model="gpt", optimizer=SGD, seeds=(1, 2), steps=6), TINY, ["fp32"])
    assert outcome["lr"] in (0.01, 0.02, 0.05, 0.1, 0.2, 0.4)


def test_all_methods_start_from_the_same_trained_weights() -> None:
    job = Job(model="gpt", optimizer=SGD, seeds=(1, 2), steps=1, pretrained=8, lr=0.0)
    losses = train(job, TINY, ["fp32", "4 bits", CANARY])["losses"]
    untrained = train(replace(job, pretrained=0), TINY, ["fp32"])["losses"]["fp32"]
    assert losses["fp32"] == losses["4 bits"] == losses[CANARY]
    assert all(own < before for own, before in zip(losses["fp32"], untrained, strict=True))


def test_verdicts() -> None:
    base = [2.0, 2.1, 1.9, 2.0]
    shifts = {
        "fp32": [0.0] * 4,
        "fp32, nudged 1": [0.01, -0.01, 0.01, -0.01],
        OTHER_DATA: [0.1, -0.1, 0.05, -0.05],
        "better": [-0.1] * 4,
        "noisy": [0.06, -0.05, 0.05, 0.02],
        "a little worse": [0.03, 0.02, 0.03, 0.02],
        CANARY: [1.0, 1.0, 1.0, 1.0],
        WEIGHT_CANARY: [98.0, 0.0, 98.0, 0.0],
    }
    outcome = {
        "model": "gpt",
        "optimizer": SGD,
        "losses": {n: [a + b for a, b in zip(base, own, strict=True)] for n, own in shifts.items()},
        "bytes_over_uniform4": dict.fromkeys(shifts, 1.0),
        "work": dict.fromkeys(shifts, "one pass"),
    }
    worse = {row["method"] for row in rows_of(outcome) if row["worse"]}
    assert worse == {"a little worse", CANARY, WEIGHT_CANARY}


def test_rounded_weights_are_those_of_the_codec() -> None:
    values = _gradients()
    codec = Block(bits=8, block=256, stochastic=False)
    assert torch.equal(
        nearest(values, 8, 256), codec.decode(codec.encode(values), values.shape, values.dtype)
    )
