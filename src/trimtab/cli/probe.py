"""`trimtab probe`: measure this machine's devices and links."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from trimtab.cli.device_option import Device
from trimtab.cluster import Cluster
from trimtab.errors import TrimtabError
from trimtab.strict_files import require_writable


def probe(
    out: Annotated[Path, typer.Option(help="File to write (.json or .yaml).")] = Path("cluster.json"),
    model: Annotated[
        str, typer.Option(help="gpt, gpt2, bert, vit, resnet50, or module:function for your own.")
    ] = "gpt",
    device: Device = "cpu",
    batch: Annotated[
        str, typer.Option(help="Samples per rank, comma-separated: at least two sizes.")
    ] = "2,4,6",
    precision: Annotated[
        str | None,
        typer.Option(
            help="Precisions besides the model's own, comma-separated; by default all that may pay off."
        ),
    ] = None,
    bits: Annotated[str, typer.Option(help="Bits of compressed gradients, comma-separated.")] = "4,8",
    autocast: Annotated[str | None, typer.Option(help="bf16 or fp16.")] = None,
    seconds: Annotated[float, typer.Option(min=1, help="Start no measurement after this time.")] = 120.0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Ignore cached measurements.")] = False,
    damage: Annotated[
        bool,
        typer.Option(
            "--damage",
            help="Also measure what lower precision does to the gradient: needed to plan it without the model's code.",
        ),
    ] = False,
    nproc_per_node: Annotated[
        int | None,
        typer.Option(min=1, help="Start so many ranks here, one for each device, instead of torchrun."),
    ] = None,
    merge: Annotated[
        list[Path] | None, typer.Option(help="Measure nothing; merge these probed files. Repeatable.")
    ] = None,
) -> None:
    """What can this machine do? Devices, precisions, codec and links, measured inside real training steps.

    Example: [bold]trimtab probe --nproc-per-node 2 --model gpt2 --out cluster.json[/bold]

    On several hosts: [bold]torchrun --nnodes 2 --rdzv-endpoint HOST:PORT ... -m trimtab.cli probe --model gpt2[/bold]
    """
    from trimtab.cli.terminal import print_table, progress_bar
    from trimtab.cluster import save_cluster
    from trimtab.cluster.file import form_of
    from trimtab.measure import probe as measure

    is_first_rank = int(os.environ.get("RANK", "0")) == 0
    if is_first_rank:
        form_of(out)  # refuses other names
        require_writable(out)
    batches, listed_bits = _whole_numbers(batch, "batch"), _whole_numbers(bits, "bits")
    if not merge:
        measure.require_sizes(batches, listed_bits)  # before ranks are started that would all refuse them
    if nproc_per_node is not None:
        _check_ranks(nproc_per_node, device, merge)
        raise typer.Exit(subprocess.run(_ranks_command(nproc_per_node), check=False).returncode)
    if merge:
        cluster = measure.merge_files(merge)
    else:
        with progress_bar("probe") as progress:
            cluster = measure.probe(
                model=model,
                device=device,
                batches=batches,
                precisions=None if precision is None else [p for p in precision.split(",") if p],
                bits=listed_bits,
                autocast=autocast,
                seconds=seconds,
                fresh=fresh,
                damage=damage,
                progress=progress if is_first_rank else lambda _done, _total: None,
            )
        if not is_first_rank:
            return
    save_cluster(cluster, out)
    print_table(f"{out}", rows(cluster))


def _check_ranks(count: int, device: str, merge: list[Path] | None) -> None:
    """Refuse ranks that cannot be started here."""
    if merge:
        raise TrimtabError(
            "probe: --merge measures nothing, so --nproc-per-node has no ranks to start; drop one"
        )
    if "RANK" in os.environ:
        raise TrimtabError(
            "probe: torchrun has started this rank already; drop --nproc-per-node here, or call trimtab probe directly"
        )
    if device == "cuda":
        import torch

        if count > torch.cuda.device_count():
            raise TrimtabError(
                f"probe: --nproc-per-node {count}, and there are {torch.cuda.device_count()} GPUs: one rank for each"
            )


def _ranks_command(count: int) -> list[str]:
    """This command line on so many ranks, without the option that starts them."""
    options = sys.argv[sys.argv.index("probe") + 1 :]
    for index, option in reversed(list(enumerate(options))):
        if option.partition("=")[0] == "--nproc-per-node":
            del options[index : index + (1 if "=" in option else 2)]
    agent = [sys.executable, "-m", "trimtab.cli.agent", "--standalone", "--nproc-per-node", str(count)]
    return [*agent, "-m", str(__package__), "probe", *options]


def rows(cluster: Cluster) -> list[dict[str, Any]]:
    """A table row for each device class and each link."""
    from trimtab.measure.probe import LINK
    from trimtab.predict.operators.costs import key_of, workload_key
    from trimtab.predict.operators.measured_precisions import probed

    assert cluster.profile is not None
    table: list[dict[str, Any]] = []
    stored = [one.workload for model in cluster.profile.models.values() for one in model.workloads.values()]
    for name, device in cluster.profile.devices.items():
        # What was measured for other models is in the profile, too, from the cache.
        batches = [device.batches[key] for key in map(workload_key, stored) if key in device.batches]
        own = {
            str(key_of(operator))
            for w in stored
            for samples in device.batches.get(workload_key(w), ())
            for operator in w.at_batch(samples).operators
        }
        table.append(
            {
                "what": name,
                "is": device.called,
                "operators": len(own & device.operators.keys()) if stored else len(device.operators),
                "batches": "; ".join(
                    ", ".join(map(str, sizes)) for sizes in (batches if stored else device.batches.values())
                )
                or None,
                "precisions": ", ".join(probed(cluster.profile, name)) or None,
                "codec bits": ", ".join(device.codec) or None,
            }
        )
    for title, collectives in cluster.profile.links.items():
        name = title if title.startswith(LINK) else f"link {title}"
        for collective, time in collectives.items():
            rate = f"{8 / time.per_byte_s / 1e9:.3g} Gbit/s" if time.per_byte_s else "-"
            table.append({"what": name, "is": f"{collective}: {rate}, {time.per_message_s * 1e6:.0f} us"})
    return table


def _whole_numbers(text: str, option: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",") if part]
    except ValueError:
        numbers = [0]
    if any(number < 1 for number in numbers):
        raise TrimtabError(f"probe: --{option} {text!r} is not a list of whole numbers such as 2,6")
    return numbers
