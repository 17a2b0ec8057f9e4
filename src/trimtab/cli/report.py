"""`trimtab report`: what happened in a run, as one HTML page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trimtab.errors import TrimtabError
from trimtab.strict_files import require_writable

if TYPE_CHECKING:
    from trimtab.cluster import Cluster
    from trimtab.report.page.cards import Card
    from trimtab.report.page.run_data import RunData


def report(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[RUN] [OTHER]",
            help="Run folder, as made by `trimtab run`; by default the newest. Two are laid side by side.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="File to write (.html); by default report.html in the (last) run folder."),
    ] = None,
    cluster: Annotated[
        Path | None,
        typer.Option(help="Cluster file, for links and prices; by default the one the run was given."),
    ] = None,
    price: Annotated[
        list[str] | None, typer.Option(help="Price of a device for an hour: T4=0.35. Repeatable.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="STEP120.JSON",
            help="Also write a measured step for ui.perfetto.dev: the recorded one nearest to the number in the name.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """What happened? One page that needs no network: where each step went, what was decided and what it brought.

    Example: [bold]trimtab report trimtab-runs/20261116-120000-train[/bold]
    """
    from trimtab.planning.cluster_changes import parsed_prices
    from trimtab.report.page.compare import compared_document
    from trimtab.report.page.document import Document, fitted, write_page
    from trimtab.report.page.run import run_document
    from trimtab.report.run_folder import latest_run
    from trimtab.report.trace import write_trace

    folders = runs or [latest_run()]
    if len(folders) > 2:
        raise TrimtabError(f"report: one or two run folders are shown on a page; got {len(folders)}")
    if out is None:
        out = folders[-1] / ("report.html" if len(folders) == 1 else "comparison.html")
    if out.suffix.lower() not in (".html", ".htm"):
        raise TrimtabError(f"{out}: a report must end in .html")
    prices = parsed_prices(price or [])
    loaded = [_loaded(folder, cluster, prices) for folder in folders]
    require_writable(out)
    verdict = ""

    def make(points: int) -> Document:
        nonlocal verdict
        (first, cards), (second, _) = loaded[0], loaded[-1]
        if len(loaded) == 1:
            document = run_document(first, points, cluster=cards)
        else:
            document = compared_document(first, second, points)
        verdict = document.verdict
        return document

    traced = None if trace is None else write_trace(loaded[0][0].run, trace)
    write_page(fitted(make), out)
    if as_json:
        wrote = {} if trace is None else {"trace": str(trace), "step": traced}
        facts = {"out": str(out), "verdict": verdict, "runs": [str(folder) for folder in folders], **wrote}
        print(json.dumps(facts))
    else:
        print(verdict)
        print(f"report: {out}")
        if trace is not None:
            print(f"trace of step {traced}: {trace}")


def _loaded(folder: Path, cluster: Path | None, prices: Mapping[str, float]) -> tuple[RunData, list[Card]]:
    """A run with its prices, and the cards of its cluster: of the file, or as far as the ranks know it."""
    from trimtab.cluster import load_cluster
    from trimtab.report.known_cluster import known_cluster
    from trimtab.report.page.run_data import RunData
    from trimtab.report.run_folder import load_run

    data = RunData(run=load_run(folder))
    known: Cluster | None = None
    unlinked = "as fast as the medium"
    named = data.run.info.get("cluster")
    if cluster is not None:
        known, source = load_cluster(cluster), f"From {cluster}."
    elif isinstance(named, str):
        source = f"From {named}."
        with suppress(TrimtabError, ValueError):  # the file has moved; the page does without
            known = load_cluster(Path(str(data.run.info.get("directory") or "."), named))
    if known is None:
        known = known_cluster(data.run)
        source = "Recorded with the run; speeds are relative to the fastest."
        unlinked = "one host" if known is not None and len(known.hosts) == 1 else "not measured"
    data.prices = _prices(data, known, prices)
    return data, [] if known is None else cluster_cards(known, source, unlinked)


def _prices(data: RunData, cluster: Cluster | None, prices: Mapping[str, float]) -> dict[int, float]:
    """The price of each rank's device, by its name or the class of the cluster file."""
    classes = {} if cluster is None else {rank.rank: rank.device for rank in cluster.ranks()}
    found: dict[int, float] = {}
    for rank, device in data.devices.items():
        kind = classes.get(rank, "")
        names = [kind.lower(), str(device.get("name") or "").lower(), str(device.get("device") or "").lower()]
        own = None if cluster is None or not kind else cluster.devices[kind].price_per_hour
        for name, price in prices.items():
            if any(name.lower() in known for known in names if known):
                own = price
        if own is not None:
            found[rank] = own
    return found if len(found) == len(data.devices) else {}


def cluster_cards(cluster: Cluster, source: str, unlinked: str) -> list[Card]:
    """Devices, hosts and links; `unlinked` stands for a link that is not described."""
    from trimtab.report.page.cards import table

    devices = [
        [
            name,
            device.kind,
            device.model or "",
            device.speed,
            (device.memory_gib or 0) * 2**30 or None,
            device.price_per_hour,
        ]
        for name, device in cluster.devices.items()
    ]
    hosts = [
        [
            host.name if host.count == 1 else f"{host.count} like {host.name}",
            ", ".join(f"{count}x {name}" for name, count in host.devices.items()),
            host.link or unlinked,
            cluster.links[host.link].gbit_per_s if host.link else None,
            (cluster.links[host.link].latency_us or 0) * 1e-6 or None if host.link else None,
        ]
        for host in cluster.hosts
    ]
    titles = [
        ("class", ""),
        ("kind", ""),
        ("model", ""),
        ("relative speed", ""),
        ("memory", "iB"),
        ("price per hour", ""),
    ]
    links = [("host", ""), ("devices", ""), ("link", ""), ("Gbit/s", ""), ("latency", "s")]
    return [
        table("Devices", titles, devices, half=True, note=source),
        table("Hosts and links", links, hosts, half=True, note=source),
    ]
