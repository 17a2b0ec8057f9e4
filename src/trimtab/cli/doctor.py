"""`trimtab doctor`: what trimtab can do on this machine, or on a group of ranks, and what to change."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trimtab.errors import TrimtabError

if TYPE_CHECKING:
    from trimtab.measure.health import Finding, RankReport

TIMEOUT_S = 60
"""How long ranks wait for each other."""

_TBF = "tc qdisc add dev lo root handle 1: tbf rate 1gbit burst 256kb latency 50ms"
_NETEM = "tc qdisc add dev lo root netem delay 1ms"


def doctor(
    nproc: Annotated[
        int, typer.Option(min=1, help="Also start so many ranks on this machine and check them as a group.")
    ] = 1,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of a table.")
    ] = False,
    report: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """What can trimtab do here? Versions, kernels, backends, links, shared memory, permissions and GPUs.

    Under [bold]trimtab run[/bold] or torchrun it checks all ranks of the job. Exit status 1: something is broken.

    Example: [bold]trimtab run --nproc-per-node 2 -m trimtab.cli doctor[/bold]
    """
    inside = int(os.environ.get("WORLD_SIZE", "1")) > 1
    tree = _start_ranks(nproc) if nproc > 1 and not inside else _examine(inside)
    if tree is None:  # rank 0 speaks for all
        return
    if report is not None:
        report.write_text(json.dumps(tree))
        return
    if as_json:
        print(json.dumps(tree, indent=2))
    else:
        _print(tree)
    raise typer.Exit(0 if tree["usable"] else 1)


def _examine(inside: bool) -> dict[str, Any] | None:
    """Examine this rank and, inside a job, the others; the whole tree on rank 0, None on others."""
    from trimtab.measure.health import Finding, examine_rank

    own = examine_rank([_emulation])
    if not inside:
        return _tree([own], [])
    try:
        gathered = _meet(own)
    except Exception as error:
        # torch raises all sorts of errors where ranks do not find each other.
        lines = str(error).splitlines() or [""]
        lonely = Finding(
            check="group",
            status="broken",
            found=f"rank {own.rank} cannot work with the others: {type(error).__name__}: {lines[0][:300]}",
            means="no job of several ranks can run",
            change="check MASTER_ADDR, MASTER_PORT, firewalls, GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, and that "
            "every host runs the same torch",
        )
        return _tree([own], [lonely])
    return gathered if own.rank == 0 else None


def _meet(own: RankReport) -> dict[str, Any]:
    """Exchange reports with the other ranks, and measure the link between them. Collective."""
    import torch
    import torch.distributed as dist

    from trimtab.measure.health import RankReport, compare_versions, measure_link

    local, per_host = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    # Several ranks of one host on one GPU, or a host without one, cannot use NCCL.
    on_gpu = torch.cuda.is_available() and dist.is_nccl_available() and torch.cuda.device_count() >= per_host
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    try:
        trees: list[Any] = [None] * dist.get_world_size()
        # As text: another version may have other classes.
        dist.all_gather_object(trees, json.dumps([own.as_tree(), on_gpu]))
        pairs = [json.loads(text) for text in trees]
        reports = [RankReport.from_tree(tree) for tree, _ in pairs]
        if all(gpu for _, gpu in pairs):
            dist.destroy_process_group()
            torch.cuda.set_device(local)
            dist.init_process_group("nccl", timeout=timedelta(seconds=TIMEOUT_S))
        hosts = max(len({report.host for report in reports}), int(os.environ.get("GROUP_WORLD_SIZE", "1")))
        return _tree(reports, [compare_versions(reports), measure_link(hosts)])
    finally:
        dist.destroy_process_group()


def _start_ranks(count: int) -> dict[str, Any]:
    """Run doctor on so many ranks of this machine and read what rank 0 reports."""
    from trimtab.measure.health import Finding, examine_rank

    with tempfile.TemporaryDirectory(prefix="trimtab-doctor-") as folder:
        report = Path(folder, "report.json")
        done = subprocess.run(
            [
                *(
                    sys.executable,
                    "-m",
                    "torch.distributed.run",
                    "--standalone",
                    "--nproc-per-node",
                    str(count),
                ),
                *("-m", __name__.rpartition(".")[0], "doctor", "--report", str(report)),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        if report.exists():
            tree: dict[str, Any] = json.loads(report.read_text())
            return tree
    errors = [line for line in done.stderr.splitlines() if "Error" in line] or ["torchrun failed"]
    failed = Finding(
        check="group",
        status="broken",
        found=f"{count} ranks did not start here: {errors[0].strip()[:300]}",
        means="no job of several ranks can run",
        change=f"see what torchrun --standalone --nproc-per-node {count} -m trimtab.cli doctor prints",
    )
    return _tree([examine_rank([_emulation])], [failed])


def _emulation() -> Iterator[Finding]:
    """What `trimtab emulate` may do here. Nothing is left behind: namespaces end with the process that tries them."""
    from trimtab.emulate import links, mps
    from trimtab.measure.health import Finding

    def finding(what: str, problem: str | None, works: str, without: str) -> Finding:
        return Finding(
            check=f"emulate: {what}",
            status="ok" if problem is None else "limited",
            found="available" if problem is None else "not available",
            means=works if problem is None else without,
            change=problem,
        )

    try:
        links.require()
        problem = _in_namespace(_TBF, "sch_tbf")
    except TrimtabError as error:
        problem = str(error).removeprefix("emulate: ")
    yield finding(
        "links", problem, "hosts with links of any rate", "hosts are joined at this machine's speed"
    )
    if problem is None:
        problem = _in_namespace(_NETEM, "sch_netem")
        yield finding("latency", problem, "links with latency", "links without latency_us")
    problem = _cgroup_problem(("cpu", "memory"))
    yield finding("speed and memory", problem, "by control groups", "speed by duty cycles, no memory limits")
    if shutil.which("nvidia-smi"):
        try:
            mps.require()
            problem = None
        except TrimtabError as error:
            problem = str(error).removeprefix("emulate: ")
        yield finding("parts of a GPU", problem, "one GPU as several, by MPS", "one rank per GPU")


def _in_namespace(command: str, module: str) -> str | None:
    """Try a command in a network namespace of its own; says what is missing if it fails."""
    try:
        done = subprocess.run(
            ["unshare", "--net", "sh", "-c", f"ip link set lo up && {command}"],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"install util-linux (unshare): {error}"
    if done.returncode == 0:
        return None
    return (
        f"{' '.join(done.stderr.split())[:200]}: needs the capabilities SYS_ADMIN and NET_ADMIN and the kernel module "
        f"{module}"
    )


def _cgroup_problem(controllers: Sequence[str]) -> str | None:
    if os.geteuid() != 0:
        return "run as root"
    mounted: dict[str, str] = {}
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, kind, options, *_ = line.split()
        if kind == "cgroup":
            mounted.update(dict.fromkeys(options.split(","), mount))
        elif kind == "cgroup2":
            for name in Path(mount, "cgroup.controllers").read_text().split():
                mounted.setdefault(name, mount)
    for controller in controllers:
        if controller not in mounted:
            return f"mount a cgroup filesystem with the {controller} controller at /sys/fs/cgroup"
        if not os.access(mounted[controller], os.W_OK):
            return f"mount {mounted[controller]} writable (in a container: run it privileged)"
    return None


def _tree(reports: Sequence[RankReport], of_group: Sequence[Finding]) -> dict[str, Any]:
    """All findings as JSON; equal ones of several ranks as one."""
    from dataclasses import asdict

    ranks: dict[Finding, list[int]] = {}
    for report in reports:
        for finding in report.findings:
            ranks.setdefault(finding, []).append(report.rank)
    everyone = [report.rank for report in reports]
    ranks |= dict.fromkeys(of_group, everyone)
    return {
        "usable": all(finding.status != "broken" for finding in ranks),
        "world_size": max(len(reports), int(os.environ.get("WORLD_SIZE", "1"))),
        "ranks": [
            {"rank": report.rank, "host": report.host, "versions": report.versions} for report in reports
        ],
        "findings": [{**asdict(finding), "ranks": several} for finding, several in ranks.items()],
    }


def _print(tree: dict[str, Any]) -> None:
    from trimtab.cli.terminal import print_table

    several = tree["world_size"] > 1
    everyone = [rank["rank"] for rank in tree["ranks"]]
    rows = []
    for finding in tree["findings"]:
        row = {"check": finding["check"], "status": finding["status"]}
        if several:
            row["ranks"] = "all" if finding["ranks"] == everyone else ", ".join(map(str, finding["ranks"]))
        rows.append({**row, "found": finding["found"], "trimtab there": finding["means"]})
    hosts = ", ".join(dict.fromkeys(rank["host"] for rank in tree["ranks"]))
    print_table(f"trimtab doctor: {hosts}", rows)
    for finding in tree["findings"]:
        if finding["change"] is not None:
            print(f"- {finding['check']} ({finding['status']}): {finding['change']}")
    print(
        "Everything that trimtab needs works."
        if tree["usable"]
        else "Something that trimtab needs is broken."
    )
