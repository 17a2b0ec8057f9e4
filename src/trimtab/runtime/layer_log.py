"""A log of what compression does to each layer: bytes on the wire and relative error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import torch

from trimtab.codec import Block, Codec
from trimtab.codec.kernels import Kernels, kernels_for
from trimtab.codec.packing import Packing, Segment, name_hash
from trimtab.codec.random import OWN, stream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trimtab.collectives import Piece


class LayerLog:
    """Writes a JSON line per layer every `every` steps: step, name, bits, bytes, relative error.

    The error is ‖decoded - value‖ / ‖value‖ of this rank's own encoding, made with the job's
    real codec and random stream. Encoding a layer once more costs about as much as sending it
    did, which is why it is done only now and then.
    """

    def __init__(
        self,
        path: str | Path,
        codec: Codec,
        *,
        every: int,
        seed: int,
        rank: int,
        kernels: Kernels | None = None,
    ) -> None:
        """`kernels` are those of the job where they are not the device's own."""
        if every < 1:
            raise ValueError(f"every must be at least 1 step, got {every}")
        self._codec, self._every, self._seed, self._rank = codec, every, seed, rank
        self._kernels = kernels
        self._file: TextIO = Path(path).open("w", encoding="utf-8")  # noqa: SIM115 - lives as long as the job

    def __call__(self, step: int, pieces: Sequence[Piece], flat: torch.Tensor) -> None:
        if step % self._every:
            return
        key = stream(self._seed, step, self._rank, OWN)
        for piece in pieces:
            values = flat[piece.offset : piece.offset + piece.numel]
            line = {"step": step, "name": piece.name, "bits": piece.bits}
            if piece.bits:
                nbytes, decoded = self._through(piece, values, key)
                error = (decoded - values).norm() / values.norm()
                line |= {"bytes": nbytes, "relative_error": float(error)}
            else:
                line |= {"bytes": values.numel() * values.element_size(), "relative_error": 0.0}
            self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def _through(self, piece: Piece, values: torch.Tensor, key: int) -> tuple[int, torch.Tensor]:
        """The size of the encoding, and what comes out of it."""
        if not isinstance(self._codec, Block):
            payload = self._codec.encode(values, name=piece.name, stream=key)
            return payload.numel(), self._codec.decode(payload, values.shape, values.dtype)
        segment = Segment(
            offset=0, numel=piece.numel, bits=piece.bits, block=piece.block, name_hash=name_hash(piece.name)
        )
        packing = Packing(segments=(segment,), dtype=values.dtype)
        payload = torch.empty(packing.nbytes, dtype=torch.uint8, device=values.device)
        kernels = self._kernels or kernels_for(values.device)
        kernels.encode(values, packing, payload, stream=key, stochastic=self._codec.stochastic)
        decoded = torch.empty_like(values)
        kernels.decode(payload, packing, decoded)
        return packing.nbytes, decoded

    def close(self) -> None:
        self._file.close()
