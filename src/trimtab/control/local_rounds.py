"""Whether rounds that were chosen from the link and the steps still suit the workers: their changes must agree."""

from __future__ import annotations

from torch import nn

from trimtab.local.worker import LocalWorker
from trimtab.local_settings import LocalSettings
from trimtab.planning.local_steps import LocalChoice, expected_loss, of_one_step

FIRST_CHECK = 4
"""Rounds before agreement is looked at first, and then after twice as many each time: it falls while a model learns."""

SHORTER = 0.8
"""Rounds change where they become shorter by this factor: a change costs all workers a meeting."""


def is_checked(worker: LocalWorker) -> bool:
    """Whether agreement is looked at after the step that has ended."""
    rounds = worker.rounds
    return worker.at_round_end and rounds >= FIRST_CHECK and rounds & (rounds - 1) == 0


def is_better(choice: LocalChoice, every: int) -> bool:
    """Whether a new choice replaces rounds of `every` steps."""
    return choice.settings is None or choice.settings.every <= SHORTER * every


def shortened(worker: LocalWorker, module: nn.Module, settings: LocalSettings, seed: int) -> LocalWorker:
    """A worker that continues from what this one agreed on, in other rounds. Collective.

    Nothing may be under way. What rounding left out of the last exchange is lost.
    """
    state = worker.state_dict()
    worker.stop()
    following = LocalWorker(
        module, worker.group, settings, workers=worker.workers, seed=seed, start=state["agreed"]
    )
    for fragment in following.fragments:
        fragment.load_state_dict(state["agreed"], state["momentum"])
    following.missed(worker.steps, worker.samples)
    return following


def in_words(worker: LocalWorker, choice: LocalChoice | None) -> str:
    """The rounds, why they are so long if that was chosen, and the loss that is expected of them."""
    own, workers = worker.settings, worker.workers
    who = (
        "workers"
        if workers.inside is None
        else f"hosts, whose ranks average in every step ({workers.ranks}),"
    )
    text = (
        f"local steps: {workers.count} {who} agree every {own.every} steps, in "
        f"{own.bits or 32} bits and {len(worker.fragments)} fragments"
    )
    if worker.late:
        text += f"; {worker.late} fragments came late and were taken later"
    reason = None if choice is None else choice.reason
    measured = worker.agreement.value
    if reason is None or measured is not None:
        common = None if measured is None else of_one_step(measured, own.every)
        expected = expected_loss(workers.count, own.every, own.bits, common)
        reason = expected if reason is None else f"{reason}; measured by now: {expected}"
    return f"{text}; {reason}"
