"""A log of what compression does to each layer: bytes on the wire and relative error."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import torch

from trimtab.codec import Block, Codec
from trimtab.collectives import Piece
from trimtab.environment import logger
from trimtab.random_bits import OWN, stream


class LayerLog:
    """Writes a JSON line per layer every `every` steps: step, name, bits, bytes, relative error.

    The error is ‖decoded - value‖ / ‖value‖ of this rank's own encoding, with the job's codec and random
    stream. Encoding a layer once more costs about as much as sending it, so it is done only now and then.
    """

    def __init__(
        self, path: str | Path, codec: Callable[[], Codec], *, every: int, seed: int, rank: int
    ) -> None:
        """`codec` returns the current codec, which may change while a job runs."""
        if every < 1:
            raise ValueError(f"every must be at least 1 step, got {every}")
        self._codec, self._every, self._seed, self._rank = codec, every, seed, rank
        self._file: TextIO | None = Path(path).open("w", encoding="utf-8")  # noqa: SIM115 - lives as long as the job

    def __call__(self, step: int, pieces: Sequence[Piece], flat: torch.Tensor) -> None:
        if self._file is None or step % self._every:
            return
        key = stream(self._seed, step, self._rank, OWN)
        lines = []
        for piece in pieces:
            values = flat[piece.span]
            line = {"step": step, "name": piece.name, "bits": piece.bits}
            if piece.bits:
                codec = self._codec()
                if isinstance(codec, Block):
                    codec = Block(bits=piece.bits, block=piece.block, stochastic=codec.stochastic)
                payload = codec.encode(values, name=piece.name, stream=key)
                error = (codec.decode(payload, values.shape, values.dtype) - values).norm() / values.norm()
                line |= {"bytes": payload.numel(), "relative_error": float(error)}
            else:
                line |= {"bytes": values.numel() * values.element_size(), "relative_error": 0.0}
            lines.append(json.dumps(line) + "\n")
        try:
            self._file.writelines(lines)
            self._file.flush()
        except OSError as error:  # a log is no reason to end a training
            logger().warning("step %d: the layer log %s ends here: %s", step, self._file.name, error)
            self.close()

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # it writes what is left
                file.close()
