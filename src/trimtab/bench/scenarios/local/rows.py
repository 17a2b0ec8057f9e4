"""`trimtab bench local`: local steps over slow links, beside exchanging gradients in every step.

Speed: a GPT of 25 million parameters on emulated hosts. `ideal` is every worker by itself. Jobs of their own have hosts
of unequal speed, where a loader shares out the batches, or the steps of a round. With `--device cuda`: GPT-2 and ViT-B
on four parts of one GPU, over NCCL's sockets; only the speed.

Loss: a small GPT with AdamW, warm-up and clipping, on unshaped links, with the bits that were chosen on each link, and
rounds at least as long as those, at the weights that workers agree on after the last step; gaps are relative to DDP at
equal samples. Four workers are timed on the first link and trained with the same global batch; their speed on the
others is measured with `--full`. The canary, changes of weights in 1 bit without error feedback, must come out as
worse. `time_to_loss_s` joins the two: the steps that the small GPT needs to a loss 3 % above DDP's last one, at the
seconds of the 25 M GPT's steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from statistics import mean
from typing import Any

from trimtab.bench.harness import AA, Progress, Result, part
from trimtab.bench.losses import judged
from trimtab.bench.ranks import hosts, run_on_cluster, slices
from trimtab.bench.scenarios.local.loss import CANARY, EVERY_STEP, loss_on_rank, trained
from trimtab.bench.scenarios.local.speed import LOCAL_BY_SPEED, UNEVEN, on_rank, uneven_on_rank
from trimtab.planning.local_steps import MAX_PENALTY, REFERENCE_EVERY, longest_round

FULL = ("100mbit", "10mbit"), (2, 4)
PARTS = ("speed", "uneven", "loss")
MODELS = ("gpt2", "vit")
SLICES, SOCKETS = 4, "nccl sockets"
ALSO = 4
"""Workers that are timed on the first link, and trained, in any case."""

ALIKE = 5
"""Rounds are trained in multiples of so many steps: links often have the same one then, and it is trained once."""

NEAR = 1.03
"""`time_to_loss_s` is the time to this many times DDP's last loss."""

GPT = {"width": 512, "layers": 8, "heads": 8, "context": 128}


def local(
    links: Sequence[str],
    workers: Sequence[int],
    full: bool,
    only: Sequence[str],
    repeats: int,
    steps: int,
    seeds: int,
    samples: int,
    progress: Progress,
    device: str = "cpu",
    every: Sequence[int] = (),
    methods: Sequence[str] = (),
    model: Mapping[str, int] | None = None,
) -> Result:
    """Every link with every number of workers: step times, then losses with the rounds that were chosen.

    Args:
        samples: sequences of a worker in a step, where losses are compared.
        every: rounds of other lengths, whose speed is measured too.
        methods: those whose speed is measured, beside `local` and `ideal`; all by default.
        model: sizes of the GPT, for tests.
    """
    spec: dict[str, Any] = {
        "repeats": repeats,
        "model": model or GPT,
        "every": list(every),
        "methods": list(methods),
    }
    if device == "cuda":
        return on_gpu([name for name in only if name in MODELS] or MODELS, spec, progress)
    if full:
        links, workers = FULL
    chosen = only or PARTS
    timed = [(link, count) for link in links for count in workers]
    timed = list(dict.fromkeys([*timed, (links[0], ALSO)])) if "speed" in chosen else []
    uneven = "uneven" in chosen
    of_losses = sorted({*workers, ALSO}) if "loss" in chosen else []
    by_speed = tuple(LOCAL_BY_SPEED) if uneven else ()
    jobs = len(timed) + len(by_speed) + len(of_losses)
    speeds: dict[tuple[str, int], dict[str, Any]] = {}
    for link, count in timed:
        cluster = hosts((1.0,) * count, link=link)
        speeds[link, count] = run_on_cluster(cluster, on_rank, spec, part(progress, len(speeds), jobs))
    rows: list[dict[str, Any]] = []
    summary: dict[str, Any] = {}
    for index, follows in enumerate(by_speed):
        of_uneven = run_on_cluster(
            hosts(UNEVEN, link=links[0]),
            uneven_on_rank,
            {**spec, "uneven": follows},
            part(progress, len(timed) + index, jobs),
        )
        names = {"link": links[0], "workers": len(UNEVEN), "speeds": "/".join(f"{each:g}" for each in UNEVEN)}
        rows += [{**names, "follows_speed": follows, **row} for row in of_uneven]
        method, _ = LOCAL_BY_SPEED[follows]
        fraction = next(row["fraction_of_ideal"] for row in of_uneven if row["method"] == method)
        summary[f"uneven {method}_fraction_of_ideal"] = fraction
    for index, count in enumerate(of_losses):
        local_of = {link: rounds(speeds.get((link, count)), count) for link in links}
        spec = {
            "steps": steps,
            "seeds": seeds,
            "samples": max(1, samples * workers[0] // count),
            "methods": EVERY_STEP if count in workers else EVERY_STEP[:2],
            "rounds": sorted({one for own in local_of.values() for one in own.values()}),
        }
        curves = run_on_cluster(
            hosts((1.0,) * count),
            loss_on_rank,
            spec,
            part(progress, len(timed) + len(by_speed) + index, jobs),
        )
        measured = [links[0] if (links[0], count) in speeds else "any"]
        for link in links if count in workers else measured:
            own = local_of.get(link, local_of[links[0]])
            speed = speeds.get((link, count))
            more, figures = joined(link, count, speed, of_link(curves, own), steps, own)
            rows, summary = rows + more, summary | figures
    if not of_losses:
        for (link, count), timed_there in speeds.items():
            more, figures = joined(link, count, timed_there, None, steps)
            rows, summary = rows + more, summary | figures
    return Result(bench="local", summary=summary, rows=rows)


def on_gpu(models: Sequence[str], spec: Mapping[str, Any], progress: Progress) -> Result:
    """The speed of each model on parts of one GPU."""
    rows: list[dict[str, Any]] = []
    summary: dict[str, Any] = {}
    for index, name in enumerate(models):
        own = {**spec, "model": name, "device": "cuda"}
        speed = run_on_cluster(slices(SLICES), on_rank, own, part(progress, index, len(models)))
        more, figures = joined(SOCKETS, SLICES, speed, None, 0)
        rows += [{"model": name, **row} for row in more]
        summary |= {f"{name} {key.removeprefix(f'{SOCKETS} ')}": value for key, value in figures.items()}
    return Result(bench="local", summary=summary, rows=rows)


def rounds(speed: Mapping[str, Any] | None, count: int) -> dict[str, tuple[int, int]]:
    """Bits and rounds of the local methods, as they were chosen; uncompressed ones are trained in 8 bits.

    Where the speed was not measured: usual rounds, or the longest that the planner allows.
    """
    if speed is None:
        return {"local": (4, min(REFERENCE_EVERY, longest_round(count, MAX_PENALTY)))}
    every = {key: max(2, ALIKE * ceil(speed[key] / ALIKE)) for key in ("every", "every2") if speed[key]}
    found = {"local": (speed["bits"] or 8, every["every"])}
    return found | ({"local2bit": (2, every["every2"])} if "every2" in every else {})


def of_link(
    curves: Mapping[str, Any], local_of: Mapping[str, tuple[int, int]]
) -> dict[str, list[list[float]]]:
    """The curves of the methods on a link, with its own bits and rounds."""
    return {
        **{method: curves[method] for method in (*EVERY_STEP, CANARY) if method in curves},
        **{method: curves[trained(*own)] for method, own in local_of.items()},
    }


def joined(
    link: str,
    count: int,
    speed: Mapping[str, Any] | None,
    curves: Mapping[str, list[list[float]]] | None,
    steps: int,
    local_of: Mapping[str, tuple[int, int]] | None = None,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows and figures of a link, from what was timed and what was trained there, as far as either was.

    Args:
        local_of: bits and rounds with which the local methods were trained.
    """
    timed = {} if speed is None else {row["method"]: row for row in speed["rows"]}
    losses = (
        {} if curves is None else judged({name: [each[-1] for each in own] for name, own in curves.items()})
    )
    base = losses["ddp"]["final_loss"] if losses else None
    rows = []
    for method in dict.fromkeys((*timed, *losses)):
        row: dict[str, Any] = {
            "link": link,
            "workers": count,
            "speeds": "/".join(["1"] * count),
            "method": method,
        }
        row |= timed.get(method, {})
        if base is not None and curves is not None and method in losses:
            needed = steps_to(NEAR * base, [mean(each) for each in zip(*curves[method], strict=True)], steps)
            # The canary travels no slower than 2 bits.
            step_s = timed.get("local2bit" if method == CANARY else method, {}).get("step_s")
            row |= {
                "loss_at_equal_samples": losses[method]["final_loss"],
                "gap": losses[method]["gap"] / base,
                "worse": losses[method]["worse"],
                "trained_every": (local_of or {}).get(method, (0, None))[1],
                "time_to_loss_s": None if needed is None or step_s is None else needed * step_s,
            }
        rows.append(row)
    name = f"{link} x{count}"
    figures: dict[str, Any] = {}
    if speed is not None:
        figures |= {
            f"{name} every": speed["every"],
            f"{name} local_over_ddp": timed["local"]["over_ddp"],
            f"{name} local_fraction_of_ideal": timed["local"]["fraction_of_ideal"],
            f"{name} predicted_s": speed["predicted_s"],
            f"{name} explain": speed["explain"],
        }
    if losses:
        figures |= {
            f"{name} local_gap": losses["local"]["gap"] / base,
            f"{name} aa_gap": losses["ddp" + AA]["gap"] / base,
            f"{name} canary_flagged": losses[CANARY]["worse"],
            f"{name} loss_steps": steps,
        }
    return rows, figures


def steps_to(loss: float, curve: Sequence[float], steps: int) -> float | None:
    """The steps after which a curve of evenly spaced losses first is at or below a loss; None if it never is."""
    for index, value in enumerate(curve):
        if value <= loss:
            before = curve[index - 1] if index else value
            passed = 1.0 if before <= value else (before - loss) / (before - value)
            return (index + passed) * steps / len(curve)
    return None
