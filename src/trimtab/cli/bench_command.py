"""How a function with flags becomes a command of `trimtab bench`: it runs a scenario and shows the result."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any

import typer

from trimtab.bench.harness import Result
from trimtab.strict_files import require_writable

bench = typer.Typer(
    help="Does it help [bold]here[/bold]? Each bench prints a table, or with --json one object.",
    no_args_is_help=True,
)

Html = Annotated[Path | None, typer.Option(help="Also write a page with the results (.html).")]

BENCHES: dict[str, Callable[[], None]] = {}


def measures(what: str, module: str = "") -> Callable[[Callable[..., dict[str, Any] | None]], None]:
    """Make a bench of a function with its flags: the scenario of the same name is called with them.

    Args:
        what: what the progress bar says.
        module: of the scenario, if not that of the same name.

    The function returns the flags that the scenario takes in another form, if any.
    """

    def register(flags: Callable[..., dict[str, Any] | None]) -> None:
        name = flags.__name__

        @wraps(flags)
        def command(html: Path | None = None, **given: Any) -> None:
            from trimtab.cli.terminal import print_table, progress_bar

            if html is not None:
                require_writable(html)
            bound = signature(flags).bind(**given)
            bound.apply_defaults()
            arguments = {**bound.arguments, **(flags(**given) or {})}
            as_json = arguments.pop("json")
            scenario = getattr(import_module(f"trimtab.bench.scenarios.{module or name}"), name)
            with progress_bar(what) as progress:
                result: Result = scenario(**arguments, progress=progress)
            if html is not None:
                write_bench_page(result, html)
            if as_json:
                typer.echo(result.to_json())
                return
            print_table(f"trimtab bench {result.bench}", result.rows)
            print_table("summary", [{"figure": key, "value": value} for key, value in result.summary.items()])
            if html is not None:
                print(f"page: {html}")

        with_html = signature(flags, eval_str=True)
        command.__annotations__ = {name: each.annotation for name, each in with_html.parameters.items()} | {
            "html": Html
        }
        html_flag = Parameter("html", Parameter.KEYWORD_ONLY, default=None, annotation=Html)
        command.__signature__ = with_html.replace(  # type: ignore[attr-defined]
            parameters=[*with_html.parameters.values(), html_flag]
        )
        title = name.replace("_", "-")
        bench.command(title)(command)
        BENCHES[title] = command

    return register


def write_bench_page(result: Result, path: Path) -> None:
    """The page of a bench's result."""
    from trimtab.report.page.bench import bench_document
    from trimtab.report.page.document import to_html, write_page

    known = dict(result.environment)
    command = str(known.pop("command", f"trimtab bench {result.bench}"))
    document = bench_document(
        name=result.bench, rows=result.rows, summary=result.summary, settings=known, command=command
    )
    write_page(to_html(document), path)
