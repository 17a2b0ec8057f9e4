"""Checkpoints with the names and shapes of a single device, written and read by unit.

`torch.distributed.checkpoint` stores a tensor as chunks. Each rank writes the chunks of its units, so a checkpoint
does not depend on the ranks: it can be loaded with any assignment, on any number of ranks, or by plain torch on one
device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful

from trimtab.sharding.dropout.keyed import DropoutCalls, KeyedDropout, dropout_calls
from trimtab.sharding.unit_axis import runs
from trimtab.sharding.unit_block import UnitBlock, UnitTensor, sharded_model


class Checkpoint(Stateful):
    """A tensor-parallel model and its optimizers, for `torch.distributed.checkpoint`.

    Every rank calls ``dcp.save({"app": Checkpoint(model, optimizer)}, checkpoint_id=path)``, and ``dcp.load`` likewise.
    The entries `model` and `optimizer` are those of torch's ``get_state_dict`` on a single device.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = ()
    ) -> None:
        self._sharded = sharded_model(model, "Checkpoint")
        self._model = model
        self._optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)

    def state_dict(self) -> dict[str, Any]:
        """The state to save, or to load into. Tensors stored by unit have their shape on a single device."""
        self._sharded.check()
        both: tuple[Any, Any] = get_state_dict(self._model, self._optimizers)
        model, optimizer = both
        places = {
            name: (block, tensor)
            for block, tensor in self._sharded.tensors()
            for name in (tensor.name, *tensor.aliases)
        }

        def by_unit(name: str, value: Any) -> Any:
            block, tensor = places.get(name, (None, None))
            if block is None or tensor is None or getattr(value, "shape", None) != tensor.parameter.shape:
                return value
            return _UnitShards(value, block, tensor)

        model = {name: by_unit(name, value) for name, value in model.items()}
        # A new dictionary: the one from torch is the optimizer's own.
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
            counted.passes.count = int(state_dict["dropout"][counted.name])

    def _counted(self) -> list[UnitBlock | KeyedDropout | DropoutCalls]:
        """Everything that draws random numbers. Without any, a checkpoint of a single device is complete."""
        keyed = [
            module for module in self._model.modules() if isinstance(module, KeyedDropout) and module.p > 0
        ]
        blocks = [block for block in self._sharded.blocks.values() if block.draws]
        return [*blocks, *keyed, *dropout_calls(self._model)]

    def _calls(self) -> dict[str, Tensor]:
        """Number of calls of each dropout, to resume with the masks that come next."""
        return {counted.name: torch.tensor(counted.passes.count) for counted in self._counted()}


class _UnitShards(Tensor):
    """Represents a full tensor of which this rank holds some units, for `torch.distributed.checkpoint` only."""

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
            f"{func}: a tensor sharded over ranks can only be read by torch.distributed.checkpoint"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"UnitShards({self.place.name}, {tuple(self.shape)}, {self.block.count} units here)"

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [chunk for chunk, _ in self._chunks.values()]

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        replicas = self.block.sharded.replicas
        if replicas is not None and not replicas.first:  # the chunks of other replicas would overlap
            return []
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
        """The chunks of the full tensor on this rank, by offset, each with a view of its storage."""
        axis = self.place.axis
        rows = self.stored.unflatten(0, (-1, axis.width))
        owned = self.block.owned
        # With several parts, the same part of two units is not contiguous in storage: one chunk per unit then.
        unit_runs = runs(owned) if len(axis.parts) == 1 else [(s, u, 1) for s, u in enumerate(owned)]
        chunks = {}
        for slot, unit, count in unit_runs:
            begin = 0
            for (start, length), part in zip(axis.boxes(unit, count), axis.parts, strict=True):
                view = rows[slot : slot + count, begin : begin + part].flatten(0, 1).movedim(0, axis.axis)
                offsets, sizes = [0] * view.ndim, list(view.shape)
                offsets[axis.axis], sizes[axis.axis] = start, length
                chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                chunks[chunk.offsets] = (chunk, view)
                begin += part
        return chunks


def _stored(value: Any) -> Any:
    return value.stored if isinstance(value, _UnitShards) else value
