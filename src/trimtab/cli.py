"""The command line. Nothing heavy is imported until a command runs: `trimtab --help` needs no torch."""

from __future__ import annotations

import sys
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any

import typer

import trimtab
from trimtab.errors import TrimtabError

if TYPE_CHECKING:
    from collections.abc import Callable

    from trimtab.bench.result import Result

app = typer.Typer(
    name="trimtab",
    help="Train PyTorch models at full speed on uneven hardware.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
bench = typer.Typer(
    help="Does it help [bold]here[/bold]? Each bench prints a table, or with --json one object.",
    no_args_is_help=True,
)
app.add_typer(bench, name="bench")

_PASS_ON = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
    "help_option_names": [],
}

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Repeats = Annotated[int, typer.Option(min=2, help="Measured rounds, after the warm-up.")]


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"trimtab {trimtab.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    pass


# Its help is torchrun's own, since its flags are.
@app.command(context_settings=_PASS_ON)
def run(context: typer.Context) -> None:
    """Train: torchrun's flags, then a script, unchanged; its DDP gradients are compressed where that pays.

    Example: [bold]trimtab run --nproc-per-node 4 train.py --lr 0.1[/bold]
    """
    from trimtab.runtime.launch import launch

    raise typer.Exit(launch(context.args))


@app.command(context_settings={"allow_extra_args": True})
def emulate(
    context: typer.Context,
    cluster: Annotated[Path, typer.Argument(help="Cluster file (.yaml or .json).")],
    throttle: Annotated[
        str, typer.Option(help="How ranks are slowed: auto, quota, duty, competitor or gemm.")
    ] = "auto",
    schedule: Annotated[
        list[str] | None,
        typer.Option(
            help="Slow a host for a while: b=0.5@20:60 is host b at 0.5 from step 20 to 60. Repeatable."
        ),
    ] = None,
    port: Annotated[int | None, typer.Option(help="Rendezvous port; a free one when absent.")] = None,
) -> None:
    """Rehearse on one machine: run a script under torchrun over the emulated hosts of a cluster file.

    Example: [bold]trimtab emulate cluster.yaml -- train.py --lr 0.1[/bold]
    """
    from trimtab.cluster import load_cluster
    from trimtab.emulate import emulate as start
    from trimtab.emulate import parse_contention

    if not context.args:
        raise TrimtabError(f"emulate: no script; write: trimtab emulate {cluster} -- SCRIPT ARGS")
    contentions = [parse_contention(text) for text in schedule or ()]
    status = start(load_cluster(cluster), context.args, throttle=throttle, schedule=contentions, port=port)
    raise typer.Exit(status)


@app.command()
def demo() -> None:
    """All of it, in about two minutes, on the machine at hand."""
    from trimtab.runtime.demo import demo as show

    show()


@bench.command("allreduce")
def bench_allreduce(
    link: Annotated[
        str, typer.Option(help="Link rates to try: 1gbit, 100mbit, ..., none.")
    ] = "100mbit,1gbit,10gbit,none",
    size_mb: Annotated[str, typer.Option(help="Megabytes of fp32, comma-separated.")] = "1,4,16,64",
    repeats: Repeats = 7,
    json: Json = False,
) -> None:
    """Plain all-reduce between two emulated hosts, over sizes and link rates."""
    from trimtab.bench.allreduce import allreduce

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
    """Encoding and decoding 256 MiB of fp32, over copying it: one CPU thread, or the GPU."""
    from trimtab.bench.codec import codec

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
    from trimtab.bench.ddp import ddp

    _show("ddp", json, lambda progress: ddp(link, device, model, repeats, progress))


@bench.command("loss")
def bench_loss(
    steps: Annotated[int, typer.Option(min=10, help="Training steps of each run.")] = 200,
    seeds: Annotated[int, typer.Option(min=2)] = 3,
    json: Json = False,
) -> None:
    """What fewer bits do to the loss of a small GPT, beside fp32 and a setting known to be harmful."""
    from trimtab.bench.loss import loss

    _show("loss", json, lambda progress: loss(steps, seeds, progress))


@bench.command("tp")
def bench_tp(
    speed: Annotated[str, typer.Option(help="Speeds of the second rank, comma-separated.")] = "0.5,0.25",
    device: Device = "cpu",
    repeats: Repeats = 9,
    json: Json = False,
) -> None:
    """Tensor-parallel training with a slow rank: even, measured and ideal shares; torch's own beside it."""
    from trimtab.bench.tp import tp

    _show("tensor parallelism", json, lambda progress: tp(_speeds(speed), device, repeats, progress))


@bench.command("precision")
def bench_precision(device: Device = "cpu", repeats: Repeats = 5, json: Json = False) -> None:
    """Operators and whole steps in each precision, over fp32 (CPU) or bf16 (GPU)."""
    from trimtab.bench.precision import precision

    _show("precision", json, lambda progress: precision(device, repeats, progress))


@bench.command("shares")
def bench_shares(device: Device = "cpu", repeats: Repeats = 5, json: Json = False) -> None:
    """Unequal hosts with equal batches and with shares by speed, beside the sum of their rates."""
    from trimtab.bench.shares import shares

    _show("batch shares", json, lambda progress: shares(device, repeats, progress))


@bench.command("all")
def bench_all() -> None:
    """Every bench with its defaults, one after another; those this machine lacks something for say so."""
    for name, measure in (
        ("codec", bench_codec),
        ("allreduce", bench_allreduce),
        ("ddp", bench_ddp),
        ("loss", bench_loss),
        ("precision", bench_precision),
        ("shares", bench_shares),
        ("tp", bench_tp),
    ):
        try:
            measure()
        except TrimtabError as error:
            _complain(f"bench {name}: {error}")


def _speeds(text: str) -> list[float]:
    try:
        speeds = [float(part) for part in text.split(",")]
    except ValueError:
        speeds = []
    if not speeds or not all(0 < speed <= 1 for speed in speeds):
        raise TrimtabError(f"{text!r} is no list of speeds above 0 and up to 1, such as 0.5,0.25")
    return speeds


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise TrimtabError(f"{text!r} is no list of whole numbers such as 1,4,16")
    return numbers


def _show(what: str, as_json: bool, measure: Callable[[Callable[[int, int], None]], Result]) -> None:
    from trimtab.report.terminal import print_table, progress_bar

    with progress_bar(what) as progress:
        result = measure(progress)
    if as_json:
        typer.echo(result.to_json())
        return
    print_table(f"trimtab bench {result.bench}", result.rows)
    print_table("summary", [{"figure": key, "value": value} for key, value in result.summary.items()])


def main(arguments: list[str] | None = None) -> None:
    """The entry point: what a user can mend is one line on standard error and exit status 2."""
    status: Any = 0
    try:
        status = app(args=arguments, standalone_mode=False)
    except TrimtabError as error:
        status = _complain(str(error))
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "trimtab":
            raise
        status = _complain(
            f"the Python package {error.name!r} is missing; install it: pip install {error.name}"
        )
    except (typer.Abort, KeyboardInterrupt):
        status = 130
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        message = error.format_message()  # empty when help was shown instead
        status = _complain(f"{message} (see trimtab --help)") if message else 0
    sys.exit(status or 0)


def _complain(message: str) -> int:
    print(f"trimtab: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
