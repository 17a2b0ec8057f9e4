"""The faults that a chaos sequence is made of, and what the driver does to bring each about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

DATA = ("data", "planned")
DDP = ("data", "grid")
EVERY = ("data", "planned", "tensor", "grid")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One kind of fault."""

    name: str
    does: str
    by: Literal["driver", "rank", "launcher"]
    """Who brings it about: the driver, a rank itself, or the driver while the ranks run under `trimtab run`."""

    ends: bool
    """Whether the ranks end, and the job resumes from its checkpoint; otherwise it must go on."""

    words: str = ""
    """What some rank must say when they end: a regular expression."""

    jobs: tuple[str, ...] = EVERY
    links: bool = False
    """Whether it needs links that can be cut, and so root."""

    seconds: float = 0.0
    """How long it lasts, if it passes."""

    at_start: bool = False
    timeout_s: float = 5.0
    """The timeout of the job's process group, which the user chose."""


@dataclass(kw_only=True)
class Strike:
    """A fault at a place and a moment."""

    fault: Fault
    rank: int
    step: int
    delay_s: float
    """Seconds after the step was reached, so that it strikes anywhere in the next one."""

    at: float | None = None
    """When it struck, by the monotonic clock."""

    recovered_s: float | None = None
    ended_s: float | None = None
    """Seconds until every rank had ended."""


_LOST = "(?i)connection|peer|timed out|timeout|rank"


def _faults() -> list[Fault]:
    def ends(name: str, does: str, words: str = _LOST, by: Any = "driver", **options: Any) -> Fault:
        return Fault(name=name, does=does, words=words, by=by, ends=True, **options)

    def survived(name: str, does: str, by: Any = "rank", **options: Any) -> Fault:
        return Fault(name=name, does=does, by=by, ends=False, **options)

    return [
        ends("kill_rank", "SIGKILL of a rank"),
        ends("kill_worker", "SIGKILL of a data worker", "DataLoader worker", jobs=DATA),
        ends("terminate", "SIGTERM of a rank"),
        ends("interrupt", "SIGINT of all ranks, as by Ctrl-C", ""),
        survived("stop", "a rank stops for 2 s (SIGSTOP)", "driver", seconds=2.0, timeout_s=20.0),
        ends("stop_long", "a rank stops for longer than the timeout"),
        survived("cut_3s", "a link is cut for 3 s", "driver", seconds=3.0, links=True, timeout_s=20.0),
        ends("cut", "a link is cut for good", links=True),
        survived(
            "slow_link", "a link falls to 5 Mbit/s for 1 s", "driver", seconds=1.0, links=True, timeout_s=20.0
        ),
        survived("nan", "a rank's activations become NaN"),
        survived("inf", "a rank's activations become infinite"),
        survived("clock_jump", "a rank's clock falls back by a day"),
        ends("out_of_memory", "a rank runs out of memory", "can't allocate memory", "rank"),
        survived("disk_full", "a rank's checkpoint finds no room"),
        survived("log_full", "the layer log's disk is full", jobs=("data",), at_start=True),
        ends("other_codec", "a rank has another codec", "other settings", "rank", jobs=DDP, at_start=True),
        ends(
            "other_seed", "a rank has another seed", "other settings", "rank", jobs=("data",), at_start=True
        ),
        ends("other_plan", "a rank has another plan", "plan", "rank", jobs=("planned",), at_start=True),
        ends(
            "other_version",
            "a rank has another wire format",
            "other settings",
            "rank",
            jobs=DDP,
            at_start=True,
        ),
        survived("disabled_rank", "TRIMTAB_DISABLE on one rank", jobs=("data",), at_start=True),
        ends("port_in_use", "the rendezvous port is taken", "EADDRINUSE|in use", "launcher", at_start=True),
        ends("bad_checkpoint", "a rank is killed, and the newest checkpoint is damaged"),
        ends("launcher_kill", "SIGKILL of `trimtab run`", "", "launcher"),
        ends("launcher_interrupt", "Ctrl-C under `trimtab run`", "", "launcher"),
        ends("launcher_terminate", "SIGTERM of `trimtab run`", "", "launcher"),
        ends(
            "launcher_rank",
            "SIGKILL of a rank under `trimtab run`",
            r"(?s)rank \d failed.*SIGKILL",
            "launcher",
        ),
    ]


FAULTS = {fault.name: fault for fault in _faults()}
CANARY = Fault(
    name="wrong_gradient", does="a rank's reduced gradient changes sign (canary)", by="rank", ends=False
)
