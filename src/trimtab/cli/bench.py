"""`trimtab bench NAME`: the command line of every bench. Nothing heavy is imported until one runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated

import typer

from trimtab.bench.result import Result
from trimtab.errors import TrimtabError

bench = typer.Typer(
    help="Does it help [bold]here[/bold]? Each bench prints a table, or with --json one object.",
    no_args_is_help=True,
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Repeats = Annotated[int, typer.Option(min=2, help="Measured rounds, after the warm-up.")]


@bench.command("allreduce")
def bench_allreduce(
    link: Annotated[
        str, typer.Option(help="Link rates to try: 1gbit, 100mbit, ..., none.")
    ] = "100mbit,1gbit,10gbit,none",
    size_mb: Annotated[str, typer.Option(help="Megabytes of fp32, comma-separated.")] = "1,4,16,64",
    repeats: Repeats = 7,
    json: Json = False,
) -> None:
    """Plain all-reduce between two emulated hosts, by size and link rate."""
    from trimtab.bench.scenarios.allreduce import allreduce

    sizes = _numbers(size_mb)
    _show("all-reduce", json, lambda progress: allreduce(link.split(","), sizes, repeats, progress))


@bench.command("codec")
def bench_codec(
    device: Device = "cpu",
    bits: Annotated[int, typer.Option(min=1, max=8)] = 4,
    block: Annotated[int, typer.Option(min=8)] = 1024,
    repeats: Repeats = 15,
    json: Json = False,
) -> None:
    """Encoding and decoding 256 MiB of fp32, relative to copying it: one CPU thread, or the GPU."""
    from trimtab.bench.scenarios.codec import codec

    _show("codec", json, lambda progress: codec(device, bits, block, repeats, progress))


@bench.command("ddp")
def bench_ddp(
    link: Annotated[str, typer.Option(help="Link rate: 1gbit, 100mbit, ..., none.")] = "1gbit",
    device: Device = "cpu",
    model: Annotated[str, typer.Option(help="gpt25m, or with --device cuda gpt2 or vit.")] = "gpt25m",
    repeats: Repeats = 7,
    json: Json = False,
) -> None:
    """A training step by every way to send the gradients: two emulated hosts, or four slices of a GPU."""
    from trimtab.bench.scenarios.ddp import ddp

    _show("ddp", json, lambda progress: ddp(link, device, model, repeats, progress))


@bench.command("fsdp")
def bench_fsdp(
    link: Annotated[str, typer.Option(help="Link rate: 1gbit, 100mbit, ..., none.")] = "1gbit",
    device: Device = "cpu",
    layers: Annotated[int, typer.Option(min=1, help="Layers of the GPT on the CPU.")] = 8,
    repeats: Repeats = 5,
    steps: Annotated[int, typer.Option(min=10, help="Training steps of each run for the losses.")] = 200,
    seeds: Annotated[int, typer.Option(min=2)] = 3,
    json: Json = False,
) -> None:
    """FSDP2 with gradients, and gradients and weights, in fewer bits: step times, bytes and losses."""
    from trimtab.bench.scenarios.fsdp import fsdp

    _show("fsdp", json, lambda progress: fsdp(link, device, layers, repeats, steps, seeds, progress))


@bench.command("hierarchy")
def bench_hierarchy(
    link: Annotated[
        str, typer.Option(help="Link rate between the hosts: 1gbit, 100mbit, ..., none.")
    ] = "1gbit",
    layers: Annotated[int, typer.Option(min=1, help="Layers of 3.2 million parameters.")] = 8,
    inside_mb: Annotated[int, typer.Option(min=1, help="Megabytes of the all-reduce inside a host.")] = 64,
    repeats: Repeats = 7,
    json: Json = False,
) -> None:
    """Two hosts of two ranks: flat and in two levels, plain and compressed, with shared memory inside a host."""
    from trimtab.bench.scenarios.hierarchy import hierarchy

    _show("hierarchy", json, lambda progress: hierarchy(link, layers, inside_mb, repeats, progress))


@bench.command("loss")
def bench_loss(
    steps: Annotated[int, typer.Option(min=10, help="Training steps of each run.")] = 200,
    seeds: Annotated[int, typer.Option(min=2)] = 3,
    json: Json = False,
) -> None:
    """What fewer bits do to the loss of a small GPT, compared with fp32 and a setting known to be harmful."""
    from trimtab.bench.scenarios.loss import loss

    _show("loss", json, lambda progress: loss(steps, seeds, progress))


@bench.command("adaptive")
def bench_adaptive(
    steps: Annotated[int, typer.Option(min=10, help="Training steps of each run.")] = 200,
    seeds: Annotated[int, typer.Option(min=2)] = 3,
    json: Json = False,
) -> None:
    """Bits chosen per layer, compared with uniform bits and fp32: bytes and losses, with SGD and with AdamW."""
    from trimtab.bench.scenarios.adaptive import adaptive

    _show("adaptive", json, lambda progress: adaptive(steps, seeds, progress))


@bench.command("tp")
def bench_tp(
    speed: Annotated[str, typer.Option(help="Speeds of the second rank, comma-separated.")] = "0.5,0.25",
    device: Device = "cpu",
    repeats: Repeats = 9,
    json: Json = False,
) -> None:
    """Tensor-parallel training with a slow rank: even, measured and ideal shares, and torch's own."""
    from trimtab.bench.scenarios.tp import tp

    _show("tensor parallelism", json, lambda progress: tp(_speeds(speed), device, repeats, progress))


@bench.command("precision")
def bench_precision(device: Device = "cpu", repeats: Repeats = 5, json: Json = False) -> None:
    """Operators and whole steps in each precision, relative to fp32 (CPU) or bf16 (GPU)."""
    from trimtab.bench.scenarios.precision import precision

    _show("precision", json, lambda progress: precision(device, repeats, progress))


@bench.command("shares")
def bench_shares(device: Device = "cpu", repeats: Repeats = 5, json: Json = False) -> None:
    """Unequal hosts with equal batches and with shares by speed, compared with the sum of their rates."""
    from trimtab.bench.scenarios.shares import shares

    _show("batch shares", json, lambda progress: shares(device, repeats, progress))


@bench.command("straggler")
def bench_straggler(
    device: Device = "cpu",
    repeats: Repeats = 8,
    only: Annotated[
        str,
        typer.Option(help="Settings to run, comma-separated: gpt-half, contention, ...; all when absent."),
    ] = "",
    json: Json = False,
) -> None:
    """Slow ranks in a running tensor-parallel job: left alone, resized, migrated, and by the controller."""
    from trimtab.bench.scenarios.straggler.straggler import straggler

    chosen = [name for name in only.split(",") if name]
    _show("stragglers", json, lambda progress: straggler(device, repeats, chosen, progress))


@bench.command("predict")
def bench_predict(device: Device = "cpu", rounds: Repeats = 7, json: Json = False) -> None:
    """Predicted step times of plans compared with measured ones: three models on two unequal ranks."""
    from trimtab.bench.scenarios.predict.predict import predict

    _show("predictor", json, lambda progress: predict(device, rounds, progress))


@bench.command("hybrid")
def bench_hybrid(
    device: Device = "cpu",
    repeats: Repeats = 5,
    seeds: Annotated[int, typer.Option(min=2, help="Seeds of the runs that compare losses.")] = 5,
    only: Annotated[
        str,
        typer.Option(
            help="Clusters (1.0/0.75, 1.0/0.4, memory) and parts (loss, allocator); all when absent."
        ),
    ] = "",
    json: Json = False,
) -> None:
    """Unequal ranks by lower precision, by batch shares and by both, as planned; losses and gradients."""
    from trimtab.bench.scenarios.hybrid.hybrid import hybrid

    chosen = [name for name in only.split(",") if name]
    _show("hybrid", json, lambda progress: hybrid(device, repeats, seeds, chosen, progress))


@bench.command("all")
def bench_all() -> None:
    """Every bench with its defaults, one after another; one that this machine cannot run says why."""
    for name, measure in (
        ("codec", bench_codec),
        ("allreduce", bench_allreduce),
        ("ddp", bench_ddp),
        ("fsdp", bench_fsdp),
        ("hierarchy", bench_hierarchy),
        ("hybrid", bench_hybrid),
        ("loss", bench_loss),
        ("adaptive", bench_adaptive),
        ("precision", bench_precision),
        ("predict", bench_predict),
        ("shares", bench_shares),
        ("tp", bench_tp),
        ("straggler", bench_straggler),
    ):
        try:
            measure()
        except TrimtabError as error:
            print(f"trimtab: bench {name}: {error}", file=sys.stderr)


def _speeds(text: str) -> list[float]:
    try:
        speeds = [float(part) for part in text.split(",")]
    except ValueError:
        speeds = []
    if not speeds or not all(0 < speed <= 1 for speed in speeds):
        raise TrimtabError(f"{text!r} is not a list of speeds above 0 and up to 1, such as 0.5,0.25")
    return speeds


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise TrimtabError(f"{text!r} is not a list of whole numbers such as 1,4,16")
    return numbers


def _show(what: str, as_json: bool, measure: Callable[[Callable[[int, int], None]], Result]) -> None:
    from trimtab.cli.terminal import print_table, progress_bar

    with progress_bar(what) as progress:
        result = measure(progress)
    if as_json:
        typer.echo(result.to_json())
        return
    print_table(f"trimtab bench {result.bench}", result.rows)
    print_table("summary", [{"figure": key, "value": value} for key, value in result.summary.items()])
