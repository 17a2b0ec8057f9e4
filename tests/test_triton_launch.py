"""What launches by address rest on; tests/gpu runs them."""

from __future__ import annotations

import torch

from trimtab.triton_launch import Launch, Room, take


def test_addresses_of_a_room_are_those_of_its_tensors() -> None:
    sizes = [(torch.int8, 37), (torch.float32, 5), (torch.int64, 0), (torch.int64, 3), (torch.int8, 1)]
    room = Room(*sizes)
    memory = torch.empty(room.nbytes, dtype=torch.int8)
    tensors, addresses = room.tensors(memory), room.addresses(memory)
    assert [(t.dtype, t.numel()) for t in tensors] == sizes
    filled = [(t, a) for t, a in zip(tensors, addresses, strict=True) if t.numel()]
    assert [t.data_ptr() for t, _ in filled] == [a for _, a in filled]
    assert all((a - memory.data_ptr()) % 16 == 0 for a in addresses)
    for number, (tensor, _) in enumerate(filled):
        tensor.fill_(number)
    assert [set(t.tolist()) for t, _ in filled] == [{number} for number in range(len(filled))]


def test_kernels_that_are_not_compiled_take_no_addresses() -> None:
    launch = Launch(None, (1, 1, 1), (), {})
    assert not take((launch,), [0])
