"""What is chosen is never slower than a uniform setting that could have been: on any link, for any size, by both kinds
of optimizer. Codec time counts as well as bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.planning.compression.bit_planner import BitPlanner, PlannerSettings
from trimtab.planning.compression.family import ADAMW, FAMILIES, SAME, SGD, passed_families
from trimtab.planning.compression.payoff import KEEP_MARGIN, MAX_TIME_RATIO, MIN_SAVED_S, decide_family
from trimtab.predict.exchange import Exchange, wire_seconds
from trimtab.wire_format import encoded_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

LINKS = st.floats(0.01, 10.0)
"""Gbit/s: 10 Mbit/s to 10 Gbit/s."""

OPTIMIZERS = st.sampled_from([SGD, ADAMW])


@st.composite
def measured(draw: st.DrawFn, optimizer: str, numel: int, link: float) -> dict[str, Exchange]:
    """Every family that suits the optimizer, timed: its own codec's work, and its bytes on the link."""
    latency = draw(st.floats(1e-5, 5e-3))
    exchanges = {}
    for name in sorted(passed_families(optimizer=optimizer)):
        family = FAMILIES[name]
        work = numel * draw(st.floats(0.1e-9, 5e-9)) * (2 if family.error_feedback else 1)
        wire = wire_seconds(encoded_bytes(numel, family.expected, family.block), link)
        exchanges[name] = Exchange(
            nbytes=4 * numel,
            plain_s=latency + wire_seconds(4 * numel, link),
            compressed_s=latency + wire + work,
            bits=family.expected,
            work_s=work if draw(st.booleans()) else 0.0,
        )
    return exchanges


@given(data=st.data(), optimizer=OPTIMIZERS, numel=st.integers(1 << 12, 1 << 30), link=LINKS)
@settings(max_examples=200)
def test_no_family_that_suits_the_optimizer_is_faster(
    data: st.DataObject, optimizer: str, numel: int, link: float
) -> None:
    exchanges = data.draw(measured(optimizer, numel, link))
    name, decision = decide_family(exchanges, 4 * numel)
    assert exchanges[name].cost_s <= (1 + SAME) * min(exchange.cost_s for exchange in exchanges.values())
    own = exchanges[name]
    if decision.compress:
        assert own.compressed_s < own.plain_s
    else:  # what is given up is small
        assert own.compressed_s > MAX_TIME_RATIO * own.plain_s or own.plain_s - own.compressed_s < MIN_SAVED_S
    remembered = decide_family(exchanges, 4 * numel, True)[1]
    assert not remembered.compress or own.compressed_s <= (MAX_TIME_RATIO + KEEP_MARGIN) * own.plain_s


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Statistics of a layer whose values are distributed alike everywhere: no strain."""

    name: str
    numel: int
    norm: float
    latest: float
    exactness: float
    owed: float = 0.0

    def relative_errors(
        self, bits: Iterable[int], *, stochastic: bool, block: int, own: bool
    ) -> dict[int, float]:
        return {b: self.exactness / (2**b - 1) for b in bits}

    def strain(self, block: int) -> float:
        return 0.0


@st.composite
def models(draw: st.DrawFn) -> list[Layer]:
    layers = []
    for index in range(draw(st.integers(1, 12))):
        norm = draw(st.floats(1e-3, 1e3))
        layers.append(
            Layer(
                name=f"layer{index}",
                numel=draw(st.integers(2048, 1 << 24)),
                norm=norm,
                latest=norm,
                exactness=draw(st.floats(0.5, 2.0)),
            )
        )
    return layers


@given(layers=models(), name=st.sampled_from(sorted(FAMILIES)), link=st.one_of(st.just(0.0), LINKS))
@settings(max_examples=100, deadline=None)
def test_a_plan_takes_no_longer_than_the_same_bits_for_all(
    layers: list[Layer], name: str, link: float
) -> None:
    family = FAMILIES[name]
    planner = BitPlanner("dynamic", PlannerSettings(name=name, gbit_per_s=link), guard=False)
    current = {layer.name: 4 for layer in layers}
    decision = planner.decide(40, layers, current, loss=None, may_plan=True, period=100)
    bits = {**current, **decision["bits"]}
    assert decision["planned"]
    assert all(planned >= family.least_bits for planned in bits.values())
    chosen, uniform = (
        sum(encoded_bytes(layer.numel, each[layer.name], family.block) for layer in layers)
        for each in (bits, dict.fromkeys(current, family.reference))
    )
    assert chosen <= uniform
