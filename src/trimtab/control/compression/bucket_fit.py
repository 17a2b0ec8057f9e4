"""DDP's buckets in the size that fits the link: measured, chosen and rebuilt once, before the hook is registered."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel

from trimtab._compat import rebuild_reducer
from trimtab.doors.ddp import DdpCompression, can_rebuild_buckets

SMALLEST_BYTES = 1 << 23
"""Gradients of fewer bytes are in few buckets of any size: nothing is measured for them."""


def fit_buckets(ddp: DistributedDataParallel, compression: DdpCompression) -> str:
    """Rebuild DDP's buckets where another size is predicted to expose less of the exchange; says what was chosen.

    Collective: every rank calls it at the same point, not during a backward pass, and all choose alike, because the
    measured times are those of the slowest rank. Buckets stay as they are where the script chose their size, and on a
    GPU: there the time of a byte vanishes beside that of a bucket in trials of this size, and larger buckets, chosen
    from them, made a step slower.
    """
    trained = {name: p for name, p in ddp.module.named_parameters() if p.requires_grad}
    trained = {name: p for name, p in trained.items() if name not in ddp.parameters_to_ignore}
    nbytes = sum(p.numel() * p.element_size() for p in trained.values())
    if nbytes < SMALLEST_BYTES or compression.device.type != "cpu" or not can_rebuild_buckets(ddp):
        return ""
    # Here, because they bring pydantic: importing `trimtab.compress` is to cost little more than importing torch.
    from trimtab.measure.host_links import measure_buckets
    from trimtab.planning.compression.buckets import bucket_cap_mb
    from trimtab.workload.buckets import MIB
    from trimtab.workload.tensor import Tensor
    from trimtab.workload.workload import Parameter

    bucket = measure_buckets(compression.trial_reduction, ddp.process_group, compression.device)
    # As DDP does before it knows better: the last ones in the model have the first gradients.
    parameters = [
        Parameter(
            name=name, tensor=Tensor(shape=(p.numel() * p.element_size(),), dtype="uint8"), operators=()
        )
        for name, p in reversed(trained.items())
    ]
    cap_mb = bucket_cap_mb(parameters, bucket)
    if int(cap_mb * MIB) == ddp.bucket_bytes_cap:
        return ""
    rebuild_reducer(ddp, int(cap_mb * MIB))
    return (
        f"DDP's buckets have {cap_mb:g} MiB: each takes {bucket.per_message_s * 1e3:.2g} ms and "
        f"{bucket.per_byte_s * MIB * 1e3:.2g} ms a MiB"
    )
