"""Checkpoints in the names and shapes of a single device, written and read by unit.

`torch.distributed.checkpoint` stores a tensor as boxes of it. Here each rank writes the boxes of its
units, so a checkpoint knows nothing of ranks: it is read with any assignment, on any number of ranks,
or by plain torch on one device.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful

from trimtab.sharding.dropout import KeyedDropout
from trimtab.sharding.unit_axis import runs
from trimtab.sharding.unit_block import sharded_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trimtab.sharding.unit_block import UnitBlock, UnitTensor


class Checkpoint(Stateful):
    """A tensor-parallel model and its optimizers, for `torch.distributed.checkpoint`.

    ``dcp.save({"app": Checkpoint(model, optimizer)}, checkpoint_id=path)`` and ``dcp.load`` of the same; every rank
    calls it. `model` and `optimizer` inside are what torch's own ``get_state_dict`` gives on a single device.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = ()
    ) -> None:
        self._sharded = sharded_model(model, "Checkpoint")
        self._model = model
        self._optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)

    def state_dict(self) -> dict[str, Any]:
        """What to save, or to load into: tensors by unit appear with the shape they have on a single device."""
        self._sharded.check()
        both: tuple[Any, Any] = get_state_dict(self._model, self._optimizers)
        model, optimizer = both
        places = {tensor.name: (block, tensor) for block, tensor in self._sharded.tensors()}

        def by_unit(name: str, value: Any) -> Any:
            block, tensor = places.get(name, (None, None))
            if block is None or tensor is None or getattr(value, "shape", None) != tensor.parameter.shape:
                return value
            return _UnitShards(value, block, tensor)

        model = {name: by_unit(name, value) for name, value in model.items()}
        # A new dictionary: the one from torch holds the optimizer's own.
        optimizer["state"] = {
            name: {key: by_unit(name, value) for key, value in states.items()}
            for name, states in optimizer["state"].items()
        }
        return {"model": model, "optimizer": optimizer, "dropout": self._calls()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        model = {name: _stored(value) for name, value in state_dict["model"].items()}
        optimizer = dict(state_dict["optimizer"])
        optimizer["state"] = {
            name: {key: _stored(value) for key, value in states.items()}
            for name, states in optimizer.get("state", {}).items()
        }
        set_state_dict(self._model, self._optimizers, model_state_dict=model, optim_state_dict=optimizer)
        for counted in self._counted():
            counted.calls = int(state_dict["dropout"][counted.name])

    def _counted(self) -> list[UnitBlock | KeyedDropout]:
        """What draws random numbers; without any, a checkpoint of a single device has all that is asked for."""
        keyed = [
            module for module in self._model.modules() if isinstance(module, KeyedDropout) and module.p > 0
        ]
        return [*(block for block in self._sharded.blocks.values() if block.draws), *keyed]

    def _calls(self) -> dict[str, Tensor]:
        """How often each dropout drew: to go on with the masks that would have come next."""
        return {counted.name: torch.tensor(counted.calls) for counted in self._counted()}


class _UnitShards(Tensor):
    """Stands for a full tensor of which this rank holds some units; speaks to `torch.distributed.checkpoint` alone."""

    stored: Tensor
    block: UnitBlock
    place: UnitTensor

    @staticmethod
    def __new__(cls, stored: Tensor, block: UnitBlock, place: UnitTensor) -> _UnitShards:
        self: _UnitShards = torch.Tensor._make_wrapper_subclass(
            cls, place.full_shape, dtype=stored.dtype, device=stored.device
        )
        self.stored, self.block, self.place = stored.detach(), block, place
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise TypeError(
            f"{func}: a tensor spread over ranks is only for torch.distributed.checkpoint to read"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"UnitShards({self.place.name}, {tuple(self.shape)}, {self.block.count} units here)"

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [chunk for chunk, _ in self._chunks.values()]

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=TensorProperties.create_from_tensor(self.stored), size=self.size()
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self._chunks[index.offset][1]

    @cached_property
    def _chunks(self) -> dict[torch.Size, tuple[ChunkStorageMetadata, Tensor]]:
        """The boxes of the full tensor that are here, by offset, each with a view of where it is stored."""
        axis = self.place.axis
        rows = self.stored.unflatten(0, (-1, axis.width))
        owned = self.block.owned
        # With several parts, the parts of two units are not side by side: one box for each unit then.
        stretches = runs(owned) if len(axis.parts) == 1 else [(s, u, 1) for s, u in enumerate(owned)]
        found = {}
        for slot, unit, count in stretches:
            begin = 0
            for (start, length), part in zip(axis.boxes(unit, count), axis.parts, strict=True):
                view = rows[slot : slot + count, begin : begin + part].flatten(0, 1).movedim(0, axis.axis)
                offsets, sizes = [0] * view.ndim, list(view.shape)
                offsets[axis.axis], sizes[axis.axis] = start, length
                chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                found[chunk.offsets] = (chunk, view)
                begin += part
        return found


def _stored(value: Any) -> Any:
    return value.stored if isinstance(value, _UnitShards) else value
