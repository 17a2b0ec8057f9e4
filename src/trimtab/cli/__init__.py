"""The command line. Nothing heavy is imported until a command runs: `trimtab --help` needs no torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

import trimtab
from trimtab.cli.bench import bench
from trimtab.errors import TrimtabError

app = typer.Typer(
    name="trimtab",
    help="Train PyTorch models at full speed on uneven hardware.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.add_typer(bench, name="bench")

_PASS_ON = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
    "help_option_names": [],
}


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
    from trimtab.cli.run import launch

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
def probe(
    out: Annotated[Path, typer.Option(help="File to write (.json or .yaml).")] = Path("cluster.json"),
    model: Annotated[
        str, typer.Option(help="gpt, gpt2, bert, vit, resnet50, or module:function for your own.")
    ] = "gpt",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    batch: Annotated[str, typer.Option(help="Samples a rank, comma-separated: two sizes or more.")] = "2,4,6",
    precision: Annotated[
        str | None,
        typer.Option(help="Beside the model's own, comma-separated; all that may pay off when absent."),
    ] = None,
    bits: Annotated[str, typer.Option(help="Of compressed gradients, comma-separated.")] = "4,8",
    autocast: Annotated[str | None, typer.Option(help="bf16 or fp16.")] = None,
    seconds: Annotated[float, typer.Option(min=1, help="Begin no measurement after this.")] = 120.0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again what the cache has.")] = False,
    merge: Annotated[
        list[Path] | None, typer.Option(help="Measure nothing: merge these probed files. Repeatable.")
    ] = None,
) -> None:
    """What can this machine do? Devices, precisions, codec and links, measured inside real training steps.

    Example: [bold]torchrun --nproc-per-node 2 -m trimtab.cli probe --model gpt2 --out cluster.json[/bold]
    """
    from trimtab.cli.probe import command

    command(
        out,
        merge or [],
        fresh=fresh,
        model=model,
        device=device,
        batches=batch,
        precisions=precision,
        bits=bits,
        autocast=autocast,
        seconds=seconds,
    )


@app.command()
def plan(
    cluster: Annotated[
        Path, typer.Option(help="Cluster file with its profile, as `trimtab probe` writes it.")
    ],
    batch_size: Annotated[int, typer.Option(min=1, help="Samples of a step, over all ranks.")],
    model: Annotated[str, typer.Option(help="As `trimtab probe` takes it.")] = "gpt",
    batch: Annotated[
        str, typer.Option(help="free: shares follow speed. fixed: equal shares, slow ranks are lowered.")
    ] = "free",
    damage: Annotated[
        float, typer.Option(min=0, help="Squared relative error of the gradient that is allowed.")
    ] = 0.01,
    bits: Annotated[
        str, typer.Option(help="Of gradients: 1 to 8, none, adaptive, or auto for the fastest.")
    ] = "auto",
    precision: Annotated[
        str | None, typer.Option(help="To choose among, comma-separated; all that were probed when absent.")
    ] = None,
    indicator: Annotated[
        str, typer.Option(help="variance, measured, depth, curvature or random.")
    ] = "variance",
    autocast: Annotated[str | None, typer.Option(help="bf16 or fp16.")] = None,
    out: Annotated[Path, typer.Option(help="File to write (.json).")] = Path("plan.json"),
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """What should each rank do? Samples, precisions and bits for every rank, as a file that `trimtab run` takes.

    Example: [bold]trimtab plan --cluster cluster.json --model gpt --batch-size 8 --out plan.json[/bold]
    """
    from trimtab.cli.plan import command

    command(
        cluster,
        model,
        out,
        bits=bits,
        batch=batch,
        as_json=json,
        batch_size=batch_size,
        damage=damage,
        indicator=indicator,
        precisions=None if precision is None else [p for p in precision.split(",") if p],
        autocast=autocast,
    )


@app.command()
def simulate(
    cluster: Annotated[
        Path, typer.Option(help="Cluster file with its profile, as `trimtab probe` writes it.")
    ],
    model: Annotated[str, typer.Option(help="As `trimtab probe` takes it.")] = "gpt",
    plan: Annotated[Path | None, typer.Option(help="What each rank does, from `trimtab plan`.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Samples of each rank that no plan speaks of.")] = 4,
    autocast: Annotated[str | None, typer.Option(help="bf16 or fp16.")] = None,
    remove: Annotated[list[str] | None, typer.Option(help="What if this host or class had one less?")] = None,
    add: Annotated[list[str] | None, typer.Option(help="What if there were more: 2xT4.")] = None,
    link_factor: Annotated[
        float | None, typer.Option(help="What if links were so many times faster?")
    ] = None,
    bits: Annotated[
        int | None, typer.Option(min=1, max=8, help="What if gradients took so many bits?")
    ] = None,
    real: Annotated[
        bool, typer.Option("--real", help="Make the model and run it once, if it looks at values.")
    ] = False,
    trace: Annotated[Path | None, typer.Option(help="Write the step for ui.perfetto.dev.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """How long would a step take on this cluster, under this plan, with these cards?

    Example: [bold]trimtab simulate --cluster cluster.json --model gpt2 --add 2xT4 --link-factor 10 --bits 4[/bold]
    """
    from trimtab.cli.simulate import command

    changes = {"remove": remove or [], "add": add or [], "link_factor": link_factor, "bits": bits}
    command(cluster, model, plan, batch, autocast, changes, real=real, trace=trace, as_json=json)


@app.command()
def demo() -> None:
    """All of it, in about two minutes, on the machine at hand."""
    from trimtab.cli.demo import demo as show

    show()


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
