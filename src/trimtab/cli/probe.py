"""The command line of `trimtab probe`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from trimtab.cli.terminal import print_table, progress_bar
from trimtab.cluster import Cluster, save_cluster
from trimtab.errors import TrimtabError
from trimtab.measure.probe import LINK, merge_files, probe
from trimtab.predict.pace import probed

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def command(
    out: Path,
    merge: Sequence[Path],
    *,
    batches: str,
    precisions: str | None,
    bits: str,
    **asked: Any,
) -> None:
    """Probe, or merge, and write the file; rank 0 speaks."""
    if merge:
        cluster = merge_files(merge)
    else:
        first = int(os.environ.get("RANK", "0")) == 0
        with progress_bar("probe") as progress:
            cluster = probe(
                batches=_whole(batches, "batch"),
                precisions=None if precisions is None else [p for p in precisions.split(",") if p],
                bits=_whole(bits, "bits"),
                progress=progress if first else _silent,
                **asked,
            )
        if not first:
            return
    save_cluster(cluster, out)
    print_table(f"{out}", rows(cluster))


def rows(cluster: Cluster) -> list[dict[str, Any]]:
    """A line for each device class and each link."""
    assert cluster.profile is not None
    found: list[dict[str, Any]] = []
    for name, device in cluster.profile.devices.items():
        found.append(
            {
                "what": name,
                "is": device.called,
                "operators": len(device.operators),
                "batches": "; ".join(", ".join(map(str, sizes)) for sizes in device.batches.values()) or None,
                "precisions": ", ".join(probed(cluster.profile, name)) or None,
                "codec bits": ", ".join(device.codec) or None,
            }
        )
    for title, collectives in cluster.profile.links.items():
        name = "link" if title == LINK else f"link {title}"
        for collective, time in collectives.items():
            rate = f"{8 / time.per_byte_s / 1e9:.3g} Gbit/s" if time.per_byte_s else "-"
            found.append({"what": name, "is": f"{collective}: {rate}, {time.per_message_s * 1e6:.0f} us"})
    return found


def _whole(text: str, what: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",") if part]
    except ValueError:
        numbers = [0]
    if any(number < 1 for number in numbers):
        raise TrimtabError(f"probe: --{what} {text!r} is no list of whole numbers such as 2,6")
    return numbers


def _silent(_done: int, _total: int) -> None:
    pass
