"""Layouts: every element owned once, cut at block boundaries, in fair shares."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from trimtab.collectives.layout import Layout, Piece, fingerprint, plan_layout

sizes = st.tuples(st.integers(0, 50_000), st.sampled_from([0, 1, 4, 8]), st.sampled_from([8, 100, 1024]))


def pieces_of(choices: list[tuple[int, int, int]]) -> list[Piece]:
    pieces, offset = [], 0
    for index, (numel, bits, block) in enumerate(choices):
        pieces.append(Piece(name=f"p{index}", offset=offset, numel=numel, bits=bits, block=block))
        offset += numel
    return pieces


@given(st.lists(sizes, max_size=6), st.integers(1, 9))
def test_every_element_has_exactly_one_owner(choices: list[tuple[int, int, int]], owners: int) -> None:
    pieces = pieces_of(choices)
    layout = plan_layout(pieces, torch.float32, owners)
    owned = torch.zeros(sum(piece.numel for piece in pieces), dtype=torch.int64)
    for chunk in layout.chunks:
        for segment in chunk.segments:
            owned[segment.offset : segment.offset + segment.numel] += 1
    assert len(layout.chunks) == owners
    assert bool((owned == 1).all())


@given(st.lists(sizes, max_size=6), st.integers(2, 9), st.data())
def test_those_who_are_spared_own_nothing(
    choices: list[tuple[int, int, int]], owners: int, data: st.DataObject
) -> None:
    pieces = pieces_of(choices)
    spared = data.draw(st.sets(st.integers(0, owners - 1), max_size=owners - 1))
    layout = plan_layout(pieces, torch.float32, owners, spared)
    assert layout.spared == bool(spared)
    assert not any(layout.chunks[owner].segments for owner in spared)
    fewer = plan_layout(pieces, torch.float32, owners - len(spared))
    assert [chunk for owner, chunk in enumerate(layout.chunks) if owner not in spared] == list(fewer.chunks)


@given(st.lists(sizes, min_size=1, max_size=6), st.integers(2, 9))
def test_a_cut_falls_on_a_block_boundary_of_its_parameter(
    choices: list[tuple[int, int, int]], owners: int
) -> None:
    pieces = pieces_of(choices)
    by_start = {piece.offset: piece for piece in pieces if piece.numel}
    for chunk in plan_layout(pieces, torch.float32, owners).chunks:
        for segment in chunk.segments:
            piece = by_start[max(start for start in by_start if start <= segment.offset)]
            assert segment.offset - piece.offset == segment.first_block * piece.block


@given(st.lists(sizes, min_size=1, max_size=6), st.integers(2, 9))
def test_chunks_are_fair_to_two_blocks(choices: list[tuple[int, int, int]], owners: int) -> None:
    layout = plan_layout(pieces_of(choices), torch.float32, owners)
    fair = sum(chunk.nbytes for chunk in layout.chunks) / owners
    # Rounding to whole blocks costs up to one, a short last block counted as average up to another.
    largest_block = 8 + 4 * 1024
    assert max(chunk.nbytes for chunk in layout.chunks) <= fair + 2 * largest_block + 16 * len(choices)


def test_a_large_parameter_is_cut_among_all_owners() -> None:
    whole = Piece(name="w", offset=7, numel=10_000_000, bits=4, block=1024)
    layout: Layout = plan_layout([whole], torch.float32, 4)
    firsts = [chunk.segments[0].first_block for chunk in layout.chunks]
    assert firsts == sorted(set(firsts))
    assert sum(chunk.segments[0].numel for chunk in layout.chunks) == whole.numel


def test_fingerprints_tell_settings_apart() -> None:
    a = Piece(name="w", offset=0, numel=10, bits=4, block=1024)
    b = Piece(name="w", offset=0, numel=10, bits=8, block=1024)
    assert fingerprint([a], "x") == fingerprint([a], "x")
    assert len({fingerprint([a], "x"), fingerprint([b], "x"), fingerprint([a], "y")}) == 3
