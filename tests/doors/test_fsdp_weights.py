"""Weights of FSDP2 in 8 bits by themselves: where the link is the bottleneck, as measured, on all ranks alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from tests.doors.fsdp_net import full, loss_of, make, same_everywhere
from torch.distributed.fsdp import MixedPrecisionPolicy

import trimtab
from trimtab.codec import Block
from trimtab.control.compression.fsdp import fsdp_compression_of
from trimtab.doors.fsdp import gathered_values, process_groups
from trimtab.errors import TrimtabError
from trimtab.measure import exchange
from trimtab.measure.exchange import measure_gather
from trimtab.planning.compression.payoff import decide_weights
from trimtab.predict.exchange import Exchange
from trimtab.wire_format import WEIGHT_BITS

if TYPE_CHECKING:
    from tests.support.pool import Pool


def measured(compressed_s: float) -> Exchange:
    return Exchange(nbytes=1 << 20, plain_s=0.1, compressed_s=compressed_s, bits=8)


@pytest.mark.parametrize(
    ("compressed_s", "nbytes", "pays"),
    [(0.03, 1 << 20, True), (0.09, 1 << 20, False), (0.2, 1 << 20, False), (0.03, 1 << 12, False)],
)
def test_weights_are_gathered_in_8_bits_where_that_gains_clearly(
    compressed_s: float, nbytes: int, pays: bool
) -> None:
    """Too little gained, a loss, and a model so small that nothing is gained in a step."""
    decision = decide_weights(measured(compressed_s), nbytes)
    assert decision.compress == pays
    assert f"weights are gathered {'in 8 bits' if pays else 'exactly'}" in decision.reason
    assert "MB take" in decision.reason


def trial() -> tuple[Exchange, tuple[torch.dtype, int]]:
    net = make(None, precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    group, _ = process_groups(net)
    assert group is not None
    dtype, numel = gathered_values(net)
    return measure_gather(group, torch.device("cpu"), dtype, 1 << 20, bits=8), (dtype, numel)


@pytest.mark.parametrize("world", [2, 3])
def test_the_gathers_of_the_job_are_timed(ranks: Pool, world: int) -> None:
    outcomes = ranks(world, trial, allow_groups=True)
    for one, (dtype, numel) in outcomes:
        assert one.plain_s == outcomes[0][0].plain_s > 0  # the slowest rank's on every rank
        assert one.compressed_s == outcomes[0][0].compressed_s > 0
        assert (dtype, one.bits) == (torch.bfloat16, 8)
        assert one.nbytes % 2 == 0
        assert 33 * 100 + 100 * 33 < numel < 12_000  # weights and what divides them evenly


def chosen(compressed_s: float, codec: Any, **settings: Any) -> tuple[int | None, str, bool]:
    """What a model is compressed to where gathers take so long; and whether all ranks compute with the same weights."""
    real = exchange.measure_gather
    exchange.measure_gather = lambda *_args, **_named: measured(compressed_s)
    try:
        net = make(None)
        net.register_buffer("many", torch.zeros(1))
        trimtab.compress(net, codec, **settings)
    finally:
        exchange.measure_gather = real
    compression = fsdp_compression_of(net)
    assert compression is not None
    for step in range(2):
        loss_of(net, step).backward()
    return compression.weight_bits, trimtab.explain(net), same_everywhere(full(net))


def large(*arguments: Any, **settings: Any) -> Any:
    """As `chosen`, for weights of which enough travel to gain anything."""
    from trimtab.planning.compression import payoff

    least, payoff.MIN_SAVED_S = payoff.MIN_SAVED_S, 0.0
    try:
        return chosen(*arguments, **settings)
    finally:
        payoff.MIN_SAVED_S = least


def test_the_choice_is_measured_explained_and_may_be_overruled(ranks: Pool) -> None:
    for bits, text, agree in ranks(2, large, 0.02, trimtab.Adaptive(), allow_groups=True):
        assert bits == WEIGHT_BITS
        assert "weights are gathered in 8 bits (" in text
        assert agree
    for bits, text, agree in ranks(2, large, 0.2, trimtab.Adaptive(), allow_groups=True):
        assert bits is None
        assert "weights are gathered exactly (" in text
        assert agree


def overruled() -> list[int | None]:
    return [
        large(0.02, trimtab.Adaptive(), weight_bits=None)[0],
        large(0.2, trimtab.Adaptive(), weight_bits=6)[0],
        large(0.02, Block(bits=4))[0],
    ]


def test_exactly_what_was_asked_for(ranks: Pool) -> None:
    """Exact weights, other bits, and with a codec nothing else."""
    assert ranks(2, overruled, allow_groups=True) == [[None, 6, None]] * 2


def on_rank_1_only() -> list[int | None]:
    """The shard groups of two replicas measure by themselves: where one gains, all gather in 8 bits."""
    real = exchange.measure_gather

    def by_replica(group: Any, *_args: Any, **_named: Any) -> Exchange:
        return measured(0.02 if dist.get_process_group_ranks(group) == [0, 1] else 0.2)

    exchange.measure_gather = by_replica
    from trimtab.planning.compression import payoff

    least, payoff.MIN_SAVED_S = payoff.MIN_SAVED_S, 0.0
    try:
        net = make(None, replicas=2)
        trimtab.compress(net, trimtab.Adaptive())
    finally:
        exchange.measure_gather, payoff.MIN_SAVED_S = real, least
    compression = fsdp_compression_of(net)
    assert compression is not None
    loss_of(net, 0).backward()
    assert same_everywhere(full(net))
    return [compression.weight_bits]


def test_replicas_gather_alike(ranks: Pool) -> None:
    assert ranks(4, on_rank_1_only, allow_groups=True) == [[WEIGHT_BITS]] * 4


def resumed() -> tuple[list[int | None], bool]:
    """Jobs that measured otherwise, after they loaded the state of one in 8 bits and of one with exact weights."""
    from trimtab.planning.compression import payoff

    def measured_at(compressed_s: float) -> Any:
        net = make(None)
        exchange.measure_gather = lambda *_args, **_named: measured(compressed_s)
        trimtab.compress(net, trimtab.Adaptive())
        return net

    real, least = exchange.measure_gather, payoff.MIN_SAVED_S
    payoff.MIN_SAVED_S = 0.0
    try:
        before, exact = measured_at(0.02), measured_at(0.2)
        into_exact, into_bits = measured_at(0.2), measured_at(0.02)
    finally:
        exchange.measure_gather, payoff.MIN_SAVED_S = real, least
    trimtab.load_state_dict(into_exact, trimtab.state_dict(before))
    trimtab.load_state_dict(into_bits, trimtab.state_dict(exact))
    nets = [before, into_exact, exact, into_bits]
    for net in nets:
        loss_of(net, 0).backward()
    gradients = [torch.cat([g.flatten() for g in full(net).values()]) for net in nets]
    bits = [compression.weight_bits for net in nets if (compression := fsdp_compression_of(net))]
    same = torch.equal(gradients[0], gradients[1]) and torch.equal(gradients[2], gradients[3])
    return bits, same and not torch.equal(gradients[0], gradients[2])


def test_a_resumed_run_keeps_what_was_measured_before(ranks: Pool) -> None:
    for bits, continued in ranks(2, resumed, allow_groups=True):
        assert bits == [WEIGHT_BITS, WEIGHT_BITS, None, None]
        assert continued


def refused() -> list[str]:
    words = []
    for bits in (0, 9, "some", 2.5):
        with pytest.raises(TrimtabError) as caught:
            make(Block(), weight_bits=bits)
        words.append(str(caught.value))
    return words


def test_what_is_refused(ranks: Pool) -> None:
    for words in ranks(2, refused, allow_groups=True):
        assert all("must be 1 to 8, None for exact weights, or 'auto'; got" in text for text in words)
