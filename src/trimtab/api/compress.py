"""`trimtab.compress`: gradients in fewer bits, where that pays."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch.nn.parallel import DistributedDataParallel

from trimtab import environment
from trimtab.codec import Codec
from trimtab.collectives.roll_call import announce
from trimtab.control.compression.adaptive import Adaptive
from trimtab.control.compression.agreement import DISABLED, agree_to_compress, compression_group
from trimtab.control.compression.ddp import compress_ddp, require_compressible
from trimtab.control.compression.explanation import record_explanation
from trimtab.control.compression.fsdp import compress_fsdp, is_fsdp
from trimtab.errors import TrimtabError
from trimtab.measure.products import refuse_wrong_products
from trimtab.wire_format import MIN_NUMEL


def compress(
    model: DistributedDataParallel,
    codec: Codec | Adaptive | None = None,
    *,
    overrides: Mapping[str, Codec | None] | None = None,
    min_numel: int = MIN_NUMEL,
    error_feedback: bool | None = None,
    seed: int = 0,
    weight_bits: int | Literal["auto"] | None = "auto",
    route: str | None = None,
    log: str | Path | None = None,
    log_every: int = 100,
) -> DistributedDataParallel:
    """Send the gradients of a DDP or FSDP2 module in fewer bits; in place, and returns the module.

    Every rank calls it, with the same arguments, after constructing DDP and before the first
    backward pass. In a script under `trimtab run` it replaces the automatic choice.

    Args:
        codec: how to encode. By default trimtab measures the link and either chooses the bits of every
            layer while training runs (`Adaptive`) or, if compression would not pay,
            leaves the module unchanged. With a codec (for example ``Block(bits=8)`` or
            ``PowerSGD(rank=4)``) the module is always compressed.
        overrides: codecs by parameter-name pattern, the first match applies; None means uncompressed.
        min_numel: parameters with fewer values, or with one axis, are sent uncompressed.
        error_feedback: add the error of one step to the next; by default only for biased codecs.
        seed: seed of the stochastic rounding.
        weight_bits: with FSDP2, also gather the weights in this many bits, rounded to nearest; None gathers them
            exactly. By default, where no codec is given, they are gathered in 8 bits if that pays as well.
        route: how ranks reduce: ``"flat"`` or ``"two-level"`` (exact inside each host first), a method (``"ring"``,
            ``"tree"``, ``"halving"``, ``"scatter-reduce"``, ``"all-gather"``), or both (``"two-level ring"``). By
            default links are measured and the fastest route is taken; ranks that are all on one host (Gloo) use
            shared memory, with exact sums, unless a codec is given.
        log: file for a JSON line per layer every `log_every` steps, with its bytes and error (of rank 0).
    """
    if not isinstance(model, torch.nn.Module):
        raise TrimtabError(
            f"compress: expected a DistributedDataParallel or FSDP2 module, got {type(model).__name__}"
        )
    sharded, group = is_fsdp(model), compression_group(model)

    def check() -> None:
        _check_numbers(min_numel, seed, log_every)
        refuse_wrong_products(next((p.device for p in model.parameters()), torch.device("cpu")))
        if not sharded:
            require_compressible(model, weight_bits)

    options: dict[str, Any] = {
        "overrides": overrides,
        "min_numel": min_numel,
        "error_feedback": error_feedback,
        "seed": seed,
        "weight_bits": weight_bits,
        "route": route,
    }
    if environment.disabled():
        if group is not None:  # ranks on which it is not set must not wait for this one
            announce(group, "trimtab.compress", DISABLED)
        explanation = "TRIMTAB_DISABLE is set: nothing is compressed"
    elif disabled := agree_to_compress(group, codec, log=log, check=check, **options):
        explanation = f"TRIMTAB_DISABLE is set on ranks {disabled}: nothing is compressed on any rank"
    elif sharded:
        explanation = compress_fsdp(model, codec, **options)
    else:
        explanation = compress_ddp(model, codec, **options, log=log, log_every=log_every)
    record_explanation(model, explanation)
    return model


def _check_numbers(min_numel: object, seed: object, log_every: object) -> None:
    """Refuse numbers that would end one rank's job later, while the others wait for it."""
    if not (isinstance(min_numel, float) or hasattr(min_numel, "__index__")):
        raise TrimtabError(f"compress: min_numel={min_numel!r}: give a number of values")
    if not hasattr(seed, "__index__"):
        raise TrimtabError(f"compress: seed={seed!r}: give a whole number")
    if not isinstance(log_every, int) or log_every < 1:
        raise TrimtabError(f"compress: log_every={log_every!r}: give a number of steps of at least 1")
