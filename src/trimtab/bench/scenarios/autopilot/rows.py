"""`trimtab bench autopilot`: three scripts that do not know trimtab, on two uneven hosts with a slow link.

Every row starts the same script anew on the same emulated hosts: under torchrun, twice (the second time with another
seed, whose difference in loss is the noise), under `trimtab run` with bits alone, with bits and shares, and with the
autopilot. `ideal-fp32` is the sum of the rates of both hosts, each training alone at the same time. The canary sends
one bit of each gradient: if its loss is not worse than the noise, the comparison of losses shows nothing. Rates are
those of the last steps, after the last change of shares or of the plan; a row also has the step of that change, and
what the steps before took beyond the rate. The summary has what the autopilot's plan cost, and when it came.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from trimtab.bench.harness import AA, Progress, Result
from trimtab.bench.ranks import hosts
from trimtab.emulate import Emulation
from trimtab.environment import RUN_DIR, logger
from trimtab.errors import TrimtabError
from trimtab.report.run_folder import load_run
from trimtab.run_settings import RunSettings

SCRIPTS = {"ddp": "ddp_gpt.py", "trainer": "hf_trainer.py", "lightning": "lightning_module.py"}
SPEEDS, LINK = {"cpu": (1.0, 0.5), "cuda": (1 / 2, 1 / 4)}, {"cpu": "300mbit", "cuda": None}
STEPS, SIZES = {"cpu": 18, "cuda": 90}, {"cpu": (512, 7, 8), "cuda": (1024, 12, 192)}
"""Steps of a run; width, layers and samples of a rank. On a GPU the exchange of plain DDP then takes about as long as
the computation, as it does on the CPU's slow link."""

TORCHRUN, AGAIN = "torchrun", "torchrun" + AA
BITS, RUN, AUTO = "bits only", "trimtab run", "trimtab run --auto"
IDEAL, CANARY = "ideal-fp32", "1 bit (canary)"
VARIANTS = "trimtab.bench.scenarios.autopilot.variants"
METHODS: dict[str, RunSettings | str | None] = {
    TORCHRUN: None,
    AGAIN: None,
    BITS: RunSettings(adjust="bits"),
    RUN: RunSettings(),
    AUTO: RunSettings(adjust="auto", auto=True),
    IDEAL: "alone",
    CANARY: "canary",
}
"""Under torchrun, behind the launcher's bootstrap with these settings, or as a variant."""

ORDER = (TORCHRUN, RUN, AUTO, IDEAL, BITS, AGAIN, CANARY)
"""In which they run: a bench that is cut short has what matters most."""

NOISES = 2.0
"""A loss within so many times the difference of two seeds is as good."""

FIRST_STEPS = 500
"""What the autopilot's measuring costs is told as a part of so many steps."""

TIMED = 0.3
"""The part of the steps, at the end, whose rate counts, if shares have settled by then."""

TAKES_EFFECT = 3
"""Steps after which all batches have the shares that were decided."""

FEWEST_TIMED = 3

ALONE_STEPS = {"cpu": 10, "cuda": 60}
"""Steps of the ranks that train alone: their loss is not compared. They do not start at the same moment."""


def autopilot(
    device: str,
    steps: int,
    only: Sequence[str],
    size: Sequence[int],
    bootstrap: str,
    progress: Progress,
    keep: Path | None = None,
    short: bool = False,
) -> Result:
    """Every script in every row.

    Args:
        steps: 0 for as many as the device needs.
        size: width, layers, and samples of a rank; nothing for the device's own.
        bootstrap: the module that `trimtab run` puts in front of a script.
        keep: where each row's record and run folder stay.
        short: without the rows that only the losses are judged by.
    """
    steps, size = steps or STEPS[device], size or SIZES[device]
    unknown = [name for name in only if name not in SCRIPTS]
    if unknown:
        raise TrimtabError(
            f"bench autopilot: there is no script {unknown[0]!r}; there are {', '.join(SCRIPTS)}"
        )
    names = [name for name in SCRIPTS if name in only or not only]
    rows: list[dict[str, Any]] = []
    summary: dict[str, Any] = {"device": device, "steps": steps}
    order = [method for method in ORDER if not short or method not in (AGAIN, CANARY)]
    done, total = 0, len(names) * len(order)
    with (
        Emulation(hosts(SPEEDS[device], device, link=LINK[device])) as emulation,
        nullcontext(keep) if keep is not None else tempfile.TemporaryDirectory() as folder,
    ):
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name in names:
            records: dict[str, list[dict[str, Any]]] = {}
            events: dict[str, list[Mapping[str, Any]]] = {}
            try:
                for method in order:
                    log = Path(folder, f"{name}-{method.replace(' ', '-')}.json")
                    taken = min(steps, ALONE_STEPS[device]) if method == IDEAL else steps
                    records[method] = _run(emulation, name, method, log, device, taken, size, bootstrap)
                    events[method] = decisions(log.with_suffix(".run"))
                    done += 1
                    progress(done, total)
            except TrimtabError as error:
                if len(names) == 1:
                    raise
                logger().error("%s", error)  # hours of the others are not lost
                summary[f"{name}_failed"] = str(error).splitlines()[0]
                continue
            records = {method: records[method] for method in METHODS if method in records}
            of_script = judged(name, records, events, size[2], len(SPEEDS[device]))
            rows += of_script
            summary |= {f"{name}_{key}": value for key, value in plan_cost(events[AUTO]).items()}
            summary |= figures(name, {row["method"]: row for row in of_script})
            if f"{name}_measuring_s" in summary:
                step_s, _ = steady(records[AUTO][0], settled(events[AUTO]))
                summary[f"{name}_measuring_part"] = summary[f"{name}_measuring_s"] / (FIRST_STEPS * step_s)
    return Result(bench="autopilot", summary=summary, rows=rows)


def _run(
    emulation: Emulation,
    name: str,
    method: str,
    log: Path,
    device: str,
    steps: int,
    size: Sequence[int],
    bootstrap: str,
) -> list[dict[str, Any]]:
    """What the script logged, of each rank where they train alone."""
    script = Path(__file__).parent / "scripts" / SCRIPTS[name]
    width, layers, batch = size
    options = {"steps": steps, "width": width, "layers": layers, "batch": batch, "device": device}
    options["seed"] = int(method == AGAIN)
    argv = [
        *launched(method, bootstrap),
        str(script),
        *(f"--{key}={value}" for key, value in options.items()),
    ]
    argv += ["--record", str(log)]
    run_folder = log.with_suffix(".run")
    environment = {"TRIMTAB_LOG": "warning", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    if isinstance(METHODS[method], RunSettings):
        environment[RUN_DIR] = str(run_folder)
    outcome = emulation.run(argv, env=environment, capture=True)
    if outcome.failure is not None:
        raise TrimtabError(f"bench autopilot: {name} under {method}: {outcome.failure}")
    logs = [Path(f"{log}.{rank}") for rank in range(2)] if method == IDEAL else [log]
    return [json.loads(path.read_text()) for path in logs]


def launched(method: str, bootstrap: str) -> list[str]:
    """What comes before the script."""
    how = METHODS[method]
    if how is None:
        return []
    return ["-m", VARIANTS, how] if isinstance(how, str) else ["-m", bootstrap, *how.arguments()]


def decisions(run_folder: Path) -> list[Mapping[str, Any]]:
    """What trimtab decided during a run; nothing where it was not there."""
    return list(load_run(run_folder).events("decision")) if (run_folder / "rank-0.jsonl").exists() else []


def last_shares(events: Sequence[Mapping[str, Any]]) -> str:
    """Samples of each rank at the end of a run, if they were changed."""
    after = [event["after"] for event in events if event["what"] == "shares"]
    return "/".join(map(str, after[-1])) if after else "even"


def plan_cost(events: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds that measuring took, and from the start to the applied plan."""
    for event in events:
        expected = event.get("expected") or {}
        if "plan_applied_s" in expected:
            return {key: expected[key] for key in ("measuring_s", "plan_applied_s")}
    return {}


def settled(events: Sequence[Mapping[str, Any]]) -> int:
    """The step of the last change of shares or of the plan; 0 if there was none."""
    return max((event["step"] for event in events if event["what"] in ("shares", "plan")), default=0)


def steady(record: Mapping[str, Any], last_change: int = 0) -> tuple[float, float]:
    """Median seconds of the last steps, and what those before, but the first, took beyond that."""
    times: list[float] = [step["time"] for step in record["steps"]]
    taken = [b - a for a, b in pairwise(times)]
    first = max(
        round((1 - TIMED) * len(times)) - 1, min(last_change + TAKES_EFFECT, len(taken) - FEWEST_TIMED), 0
    )
    seconds = median(taken[first:])
    return seconds, sum(taken[:first]) - first * seconds


def together(logs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The records of ranks that trained alone, as long as all of them did: afterwards the machine is quieter.

    Whole records where steps are so short that one rank was done before another had begun.
    """
    end = min(record["steps"][-1]["time"] for record in logs)
    common = [[step for step in record["steps"] if step["time"] <= end] for record in logs]
    if min(map(len, common)) <= FEWEST_TIMED:
        return [dict(record) for record in logs]
    return [{"steps": steps} for steps in common]


def judged(
    script: str,
    records: Mapping[str, Sequence[Mapping[str, Any]]],
    events: Mapping[str, Sequence[Mapping[str, Any]]],
    batch: int,
    ranks: int,
) -> list[dict[str, Any]]:
    """A row for each method. Alone, each rank has its own batch, and the rates add up."""
    rates, start = {}, {}
    for method, logs in records.items():
        samples = batch if method == IDEAL else batch * ranks
        timed = together(logs) if method == IDEAL else logs
        each = [steady(record, settled(events[method])) for record in timed]
        rates[method] = sum(samples / seconds for seconds, _ in each)
        start[method] = each[0][1]
    loss: dict[str, float] = {method: logs[0]["held_out"] for method, logs in records.items()}
    noise = abs(loss[AGAIN] - loss[TORCHRUN]) if AGAIN in loss else None

    def as_good(method: str) -> bool | None:
        if noise is None or method == IDEAL:
            return None
        return loss[method] - loss[TORCHRUN] <= NOISES * noise

    return [
        {
            "script": script,
            "method": method,
            "samples_per_s": rate,
            "over_torchrun": rate / rates[TORCHRUN],
            "fraction_of_ideal": rate / rates[IDEAL],
            "final_loss": None if method == IDEAL else loss[method],
            "loss_as_good": as_good(method),
            "shares": last_shares(events[method]),
            "last_change_step": settled(events[method]),
            "start_cost_s": start[method],
        }
        for method, rate in rates.items()
    ]


def figures(script: str, rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The summary of one script."""
    run, auto = rows[RUN], rows[AUTO]
    speeds = {
        f"{script}_run_over_torchrun": run["over_torchrun"],
        f"{script}_run_over_bits": run["samples_per_s"] / rows[BITS]["samples_per_s"],
        f"{script}_run_fraction_of_ideal": run["fraction_of_ideal"],
        f"{script}_auto_over_run": auto["samples_per_s"] / run["samples_per_s"],
    }
    if CANARY not in rows:
        return speeds
    return {
        **speeds,
        f"{script}_losses_as_good": bool(run["loss_as_good"] and auto["loss_as_good"]),
        f"{script}_canary_flagged": not rows[CANARY]["loss_as_good"],
    }
