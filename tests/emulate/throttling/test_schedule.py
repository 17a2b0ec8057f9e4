from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.emulate.machines import pair

from trimtab.emulate import Contention, Emulation, parse_contention
from trimtab.emulate.throttling.schedule import speed_left
from trimtab.errors import TrimtabError


def test_reads_the_written_form() -> None:
    assert parse_contention("b=0.5@20:60") == Contention(host="b", speed=0.5, from_step=20, to_step=60)
    assert parse_contention(" node-1=1e-1@0: ") == Contention(host="node-1", speed=0.1, from_step=0)


@pytest.mark.parametrize(
    "text",
    [
        *("", "b", "b=0.5", "b=0.5@20", "b=@20:60", "=0.5@1:2", "b=0.5@-1:2", "b=0.5@1:2:3", "b=x@1:2"),
        *("b=.@1:2", "b=0.5@1:2 c=0.5@1:2", "b=0x1@1:2", "b=0.5@1.5:2"),
    ],
)
def test_refuses_other_forms(text: str) -> None:
    with pytest.raises(TrimtabError, match=r"HOST=SPEED@FROM:TO, for example b=0\.5@20:60"):
        parse_contention(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("b=0@1:2", "not above 0"),
        ("b=1.5@1:2", "not above 0 and at most 1"),
        ("b=-0.5@1:2", "not above 0"),
        ("b=0.5@60:20", "steps 60 to 20 are empty"),
        ("b=0.5@20:20", "are empty"),
    ],
)
def test_refuses_values_without_meaning(text: str, message: str) -> None:
    with pytest.raises(TrimtabError, match=message):
        parse_contention(text)


@given(st.text(max_size=20))
def test_any_text_is_read_or_refused(text: str) -> None:
    with suppress(TrimtabError):
        assert parse_contention(text).speed > 0


def test_refuses_hosts_that_are_not_there_and_overlaps() -> None:
    with pytest.raises(TrimtabError, match="no host 'z' in this cluster; its hosts are a, b"):
        Emulation(pair(), schedule=[parse_contention("z=0.5@1:2")])
    overlapping = [parse_contention("b=0.5@1:"), parse_contention("b=0.2@7:9")]
    with pytest.raises(TrimtabError, match="b has two speeds at step 7"):
        Emulation(pair(), schedule=overlapping)


def test_speed_left() -> None:
    schedule = [parse_contention("b=0.5@2:4"), parse_contention("b=0.2@4:5")]
    assert [speed_left(schedule, step) for step in range(7)] == [1.0, 1.0, 0.5, 0.5, 0.2, 1.0, 1.0]
