"""`trimtab bench NAME`: the flags of every bench. Nothing heavy is imported until one runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from trimtab.cli.bench_command import BENCHES, bench, measures
from trimtab.cli.device_option import Device
from trimtab.errors import TrimtabError

__all__ = ["bench"]

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
Link = Annotated[str, typer.Option(help="Link rate: 1gbit, 100mbit, ..., none.")]
Repeats = Annotated[int, typer.Option(min=2, help="Measured rounds, after the warm-up.")]
Steps = Annotated[int, typer.Option(min=4, help="Training steps of each run.")]
Seeds = Annotated[int, typer.Option(min=2, help="Seeds of the runs that compare losses.")]


@measures("all-reduce")
def allreduce(
    link: Annotated[
        str, typer.Option(help="Link rates to try: 1gbit, 100mbit, ..., none.")
    ] = "100mbit,1gbit,10gbit,none",
    size_mb: Annotated[str, typer.Option(help="Megabytes of fp32, comma-separated.")] = "1,4,16,64",
    repeats: Repeats = 7,
    json: Json = False,
) -> dict[str, Any]:
    """Plain all-reduce between two emulated hosts, by size and link rate."""
    sizes = _numbers(size_mb, int)
    if min(sizes, default=0) < 1:
        raise TrimtabError(f"{size_mb!r} is not a list of whole numbers such as 1,4,16")
    return {"link": link.split(","), "size_mb": sizes}


@measures("codec")
def codec(
    device: Device = "cpu",
    bits: Annotated[int, typer.Option(min=1, max=8)] = 4,
    block: Annotated[int, typer.Option(min=8)] = 1024,
    repeats: Repeats = 15,
    json: Json = False,
) -> None:
    """Encoding and decoding 256 MiB of fp32, relative to copying it: one CPU thread, or the GPU."""


@measures("ddp")
def ddp(
    link: Link = "1gbit",
    hosts: Annotated[
        int, typer.Option(min=1, max=4, help="Emulated hosts of a CPU's ranks; on one, --link has no part.")
    ] = 2,
    ranks: Annotated[
        str,
        typer.Option(help="Numbers of ranks, comma-separated; two, or four slices of a GPU, when absent."),
    ] = "",
    device: Device = "cpu",
    model: Annotated[str, typer.Option(help="gpt25m, or with --device cuda gpt2 or vit.")] = "gpt25m",
    repeats: Repeats = 7,
    json: Json = False,
) -> dict[str, Any]:
    """A training step by every way to send the gradients, on emulated hosts or slices of a GPU."""
    return {"ranks": _numbers(ranks, int) if ranks else []}


@measures("fsdp")
def fsdp(
    link: Link = "1gbit",
    device: Device = "cpu",
    layers: Annotated[int, typer.Option(min=1, help="Layers of the GPT on the CPU.")] = 8,
    repeats: Repeats = 5,
    steps: Steps = 200,
    seeds: Seeds = 3,
    json: Json = False,
) -> None:
    """FSDP2 with gradients, and gradients and weights, in fewer bits: step times, bytes and losses."""


@measures("hierarchy")
def hierarchy(
    link: Link = "1gbit",
    hosts: Annotated[str, typer.Option(help="Ranks of each host: 2+2, 1+3, 2+1+1.")] = "2+2",
    layers: Annotated[int, typer.Option(min=1, help="Layers of 3.2 million parameters.")] = 8,
    inside_mb: Annotated[int, typer.Option(min=1, help="Megabytes of the all-reduce inside a host.")] = 64,
    repeats: Repeats = 7,
    json: Json = False,
) -> dict[str, Any]:
    """Hosts of several ranks: flat and in two levels, plain and compressed, with shared memory inside a host."""
    try:
        per_host = [int(ranks) for ranks in hosts.split("+")]
    except ValueError:
        per_host = []
    if not 2 <= len(per_host) <= 4 or min(per_host) < 1 or max(per_host) < 2:
        raise TrimtabError(
            f"--hosts {hosts!r}: give the ranks of 2 to 4 hosts, one with several, such as 1+3"
        )
    return {"hosts": per_host}


@measures("local steps", "local.rows")
def local(
    device: Device = "cpu",
    links: Annotated[str, typer.Option(help="Link rates, comma-separated.")] = "100mbit,10mbit",
    workers: Annotated[
        str,
        typer.Option(
            help="Numbers of workers, 2 to 4, comma-separated; 4 are measured on the first link too."
        ),
    ] = "2",
    full: Annotated[bool, typer.Option("--full", help="100 and 10 Mbit/s, 2 and 4 workers.")] = False,
    only: Annotated[
        str,
        typer.Option(
            help="Parts, comma-separated: speed, uneven, loss; with --device cuda: gpt2, vit. All when absent."
        ),
    ] = "",
    every: Annotated[
        str, typer.Option(help="Rounds of other lengths whose speed to measure too, comma-separated.")
    ] = "",
    methods: Annotated[
        str,
        typer.Option(
            help="Methods whose speed to measure beside local and ideal, comma-separated: ddp, trimtab, local2bit. "
            "All when absent."
        ),
    ] = "",
    repeats: Repeats = 2,
    steps: Steps = 180,
    seeds: Seeds = 3,
    samples: Annotated[
        int, typer.Option(min=1, help="Sequences of each of two workers where losses are compared.")
    ] = 64,
    json: Json = False,
) -> dict[str, Any]:
    """Local steps over slow links, beside gradients in every step: speed, and loss at equal samples."""
    counts = _numbers(workers, int)
    if not all(2 <= count <= 4 for count in counts):
        raise TrimtabError(f"{workers!r}: give numbers of workers from 2 to 4")
    parts = [name for name in only.split(",") if name]
    known = ("gpt2", "vit") if device == "cuda" else ("speed", "uneven", "loss")
    if wrong := sorted(set(parts) - set(known)):
        raise TrimtabError(f"bench local: there is no part {wrong[0]!r}; choose from {', '.join(known)}")
    lengths = _numbers(every, int) if every else []
    if every and min(lengths, default=0) < 2:
        raise TrimtabError(f"bench local: --every {every!r}: give numbers of steps from 2, such as 8,32")
    timed, choice = (
        [name for name in methods.split(",") if name],
        ("ddp", "trimtab", "local", "local2bit", "ideal"),
    )
    if wrong := sorted(set(timed) - set(choice)):
        raise TrimtabError(f"bench local: there is no method {wrong[0]!r}; choose from {', '.join(choice)}")
    return {
        "links": links.split(","),
        "workers": counts,
        "only": parts,
        "every": lengths,
        "methods": timed,
    }


@measures("scale")
def scale(
    ranks: Annotated[str, typer.Option(help="World sizes, comma-separated.")] = "1000,10000",
    classes: Annotated[int, typer.Option(min=1, help="Classes of devices.")] = 40,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the GPT.")] = 96,
    gbits: Annotated[str, typer.Option(help="Gbit/s of the links, comma-separated.")] = "10,100",
    json: Json = False,
) -> dict[str, Any]:
    """Planning and simulating for up to ten thousand ranks: how long it takes, and what the plan gains."""
    return {"ranks": _numbers(ranks, int), "gbits": _numbers(gbits, float)}


@measures("loss")
def loss(steps: Steps = 200, seeds: Seeds = 3, json: Json = False) -> None:
    """What fewer bits do to the loss of a small GPT, compared with fp32 and a setting known to be harmful."""


@measures("adaptive")
def adaptive(steps: Steps = 200, seeds: Seeds = 3, json: Json = False) -> None:
    """Bits chosen per layer, compared with uniform bits and fp32: bytes and losses, with SGD and with AdamW."""


@measures("tensor parallelism", "tp.tp")
def tp(
    speed: Annotated[str, typer.Option(help="Speeds of the second rank, comma-separated.")] = "0.5,0.25",
    device: Device = "cpu",
    repeats: Repeats = 9,
    json: Json = False,
) -> dict[str, Any]:
    """Tensor-parallel training with a slow rank: even, measured and ideal shares, and torch's own."""
    speeds = _numbers(speed, float)
    if not speeds or not all(0 < each <= 1 for each in speeds):
        raise TrimtabError(f"{speed!r} is not a list of speeds above 0 and up to 1, such as 0.5,0.25")
    return {"speed": speeds}


@measures("precision")
def precision(device: Device = "cpu", repeats: Repeats = 5, json: Json = False) -> None:
    """Operators and whole steps in each precision, relative to fp32 (CPU) or bf16 (GPU)."""


@measures("batch shares")
def shares(device: Device = "cpu", repeats: Repeats = 5, json: Json = False) -> None:
    """Unequal hosts with equal batches and with shares by speed, compared with the sum of their rates."""


@measures("stragglers", "straggler.straggler")
def straggler(
    device: Device = "cpu",
    repeats: Repeats = 8,
    only: Annotated[
        str,
        typer.Option(help="Settings to run, comma-separated: gpt-half, contention, ...; all when absent."),
    ] = "",
    json: Json = False,
) -> dict[str, Any]:
    """Slow ranks in a running tensor-parallel job: left alone, resized, migrated, and by the controller."""
    return {"only": [name for name in only.split(",") if name]}


@measures("predictor", "predict.predict")
def predict(
    device: Device = "cpu",
    rounds: Repeats = 7,
    only: Annotated[
        str, typer.Option(help="Kinds of plans, comma-separated, such as ddp; all when absent.")
    ] = "",
    json: Json = False,
) -> dict[str, Any]:
    """Predicted step times of plans that were not measured before, compared with measured ones, by kind of plan."""
    return {"only": [name for name in only.split(",") if name]}


@measures("hybrid", "hybrid.hybrid")
def hybrid(
    device: Device = "cpu",
    repeats: Repeats = 5,
    seeds: Seeds = 5,
    only: Annotated[
        str,
        typer.Option(
            help="Clusters (1.0/0.75, 1.0/0.4, memory) and parts (loss, allocator); all when absent."
        ),
    ] = "",
    json: Json = False,
) -> dict[str, Any]:
    """Unequal ranks by lower precision, by batch shares and by both, as planned; losses and gradients."""
    return {"only": [name for name in only.split(",") if name]}


@measures("accuracy", "hybrid_accuracy.rows")
def hybrid_accuracy(
    seeds: Seeds = 5,
    repeats: Repeats = 15,
    full: Annotated[bool, typer.Option("--full", help="At least ten seeds.")] = False,
    only: Annotated[
        str,
        typer.Option(
            help="Settings, comma-separated: resnet-digits, resnet-harder, bert-source, gpt-bytes; all when absent."
        ),
    ] = "",
    json: Json = False,
) -> dict[str, Any]:
    """A slow rank in uniformly low precision, as planned, or with fewer samples: accuracy and step time."""
    return {"only": [name for name in only.split(",") if name]}


@measures("product")
def product(device: Device = "cpu", repeats: Repeats = 3, seeds: Seeds = 3, json: Json = False) -> None:
    """Hosts uneven in links and speeds: plain DDP, each adjustment alone, and the plan that has all of them."""


@measures("autopilot", "autopilot.rows")
def autopilot(
    device: Device = "cpu",
    steps: Annotated[int, typer.Option(min=0, help="Steps of a run; 0: 18, or 90 on a GPU.")] = 0,
    only: Annotated[
        str, typer.Option(help="Scripts, comma-separated: ddp, trainer, lightning; all when absent.")
    ] = "",
    size: Annotated[str, typer.Option(help="Width, layers, and samples of a rank.")] = "",
    keep: Annotated[Path | None, typer.Option(help="Folder in which the records of every run stay.")] = None,
    short: Annotated[bool, typer.Option("--short", help="Speeds only: no A/A row and no canary.")] = False,
    json: Json = False,
) -> dict[str, Any]:
    """Scripts that do not know trimtab on uneven hosts: under torchrun, trimtab run, and its autopilot."""
    numbers = _numbers(size, int) if size else []
    if size and (len(numbers) != 3 or min(numbers) < 1 or numbers[0] % 8):
        raise TrimtabError(
            f"bench autopilot: --size {size!r}: give width (a multiple of 8), layers and samples"
        )
    scripts = [name for name in only.split(",") if name]
    return {"only": scripts, "size": numbers, "bootstrap": f"{__package__}.bootstrap"}


@measures("recorder")
def recorder(
    steps: Annotated[int, typer.Option(min=200, help="Steps of each case.")] = 2000, json: Json = False
) -> dict[str, Any]:
    """What the run folder costs a job: CPU time of recorded and unrecorded steps, and its share of a real step."""
    from trimtab.cli.run_view import REFRESH_S

    return {"refresh_s": REFRESH_S}


@measures("chaos", "chaos.chaos")
def chaos(
    seed: Annotated[int, typer.Option(help="Seed of the sequences.")] = 0,
    full: Annotated[bool, typer.Option("--full", help="At least 200 sequences, however long.")] = False,
    sequences: Annotated[int, typer.Option(min=0, help="So many sequences; 0 for 15 minutes.")] = 0,
    only: Annotated[
        str, typer.Option(help="Faults, comma-separated: kill_rank, cut, ...; all when absent.")
    ] = "",
    json: Json = False,
) -> dict[str, Any]:
    """Random faults on real ranks while bits, shares, plans and units change: hangs, wrong results, leftovers."""
    return {"only": [name for name in only.split(",") if name]}


@bench.command("all")
def bench_all() -> None:
    """Every bench with its defaults, one after another; one that this machine cannot run says why."""
    for name, measure in BENCHES.items():
        try:
            measure()
        except TrimtabError as error:
            print(f"trimtab: bench {name}: {error}", file=sys.stderr)


def _numbers(text: str, kind: Callable[[str], Any]) -> list[Any]:
    """Numbers from a comma-separated list; empty if it is not one."""
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        return []
