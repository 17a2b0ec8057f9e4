"""The commands as one application. Nothing heavy is imported until a command runs: `--help` needs no torch."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

import trimtab
from trimtab.cli.bench import bench
from trimtab.cli.demo import demo
from trimtab.cli.doctor import doctor
from trimtab.cli.emulate import emulate
from trimtab.cli.plan import plan
from trimtab.cli.probe import probe
from trimtab.cli.report import report
from trimtab.cli.run import run
from trimtab.cli.simulate import simulate
from trimtab.cli.top import top
from trimtab.errors import TrimtabError

app = typer.Typer(
    name="trimtab",
    help="Train PyTorch models at full speed on uneven hardware.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

# The help of `run` is torchrun's own, because its flags are.
_FORWARD_ARGUMENTS = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
    "help_option_names": [],
}
app.command(context_settings=_FORWARD_ARGUMENTS)(run)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(emulate)
for command in (probe, plan, simulate, report, top, demo, doctor):
    app.command()(command)
app.add_typer(bench, name="bench")


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"trimtab {trimtab.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    pass


def main(arguments: list[str] | None = None) -> None:
    """Run a command; an error that the user can fix is one line on standard error and exit status 2."""
    status: Any = 0
    try:
        status = app(args=arguments, standalone_mode=False)
    except TrimtabError as error:
        status = _print_error(str(error))
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "trimtab":
            raise
        status = _print_error(
            f"the Python package {error.name!r} is missing; install it: pip install {error.name}"
        )
    except (typer.Abort, KeyboardInterrupt):
        status = 130
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        message = error.format_message()  # empty when help was shown instead
        path = getattr(getattr(error, "ctx", None), "command_path", "trimtab")
        status = _print_error(f"{message} (see {path} --help)") if message else 0
    sys.exit(status or 0)


def _print_error(message: str) -> int:
    print(f"trimtab: {message}", file=sys.stderr)
    return 2
