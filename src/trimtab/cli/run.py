"""`trimtab run`: torchrun, with trimtab's bootstrap in front of the script."""

from __future__ import annotations

import argparse
import difflib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import typer

from trimtab.cli import run_view
from trimtab.errors import TrimtabError
from trimtab.run_settings import RunSettings
from trimtab.selector import selected

BOOTSTRAP = "trimtab.cli.bootstrap"

OPTIONS: dict[str, dict[str, Any]] = {
    "--plan": {"help": "What each rank does, from `trimtab plan`: precisions, bits and batch shares."},
    "--local-steps": {
        "metavar": "auto|H",
        "help": "Ranks train by themselves and agree on their weights every H steps, instead of exchanging gradients "
        "in every step; for slow links.",
    },
    "--max-penalty": {
        "type": float,
        "default": RunSettings.max_penalty,
        "help": "With --local-steps auto: the expected relative increase of the loss that is allowed (default 0.01).",
    },
    "--auto": {
        "action": "store_true",
        "help": "Make the plan from the job itself: measure in its first steps, plan beside the training, apply the "
        "plan between two steps, and follow it. Without --adjust everything may be adjusted.",
    },
    "--adjust": {
        "metavar": "WHAT",
        "help": "What may be adjusted: auto (all), exact (only what changes no result), none, or some of bits, shares "
        "and precision, comma-separated. Default: bits,shares; with --auto or --plan: auto.",
    },
    "--batch-sizes": {
        "metavar": "auto|equal|24,11,11",
        "default": "auto",
        "help": "How each global batch of the script's DataLoader is cut among the ranks: by their measured speeds "
        "(auto, the default), equally, or in these sizes, which must add up to the script's own.",
    },
    **run_view.OPTIONS,
}
"""Our own options beside torchrun's, as for `add_argument`; `_settings` checks them."""


def run(context: typer.Context) -> None:
    """Train an unchanged script with torchrun's flags; DDP gradients are compressed where that pays.

    Example: [bold]trimtab run --nproc-per-node 4 train.py --lr 0.1[/bold]
    """
    raise typer.Exit(launch(context.args))


def launch(arguments: Sequence[str]) -> int:
    """Run torchrun with these arguments and the script behind the bootstrap; returns torchrun's exit status."""
    command = torchrun_command(arguments)
    view = run_view.RunView(parse(arguments), arguments)
    # With the store shared between restarts, Gloo finds the dead workers' addresses in it (torch 2.13).
    environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **os.environ, **view.environment()}
    process = subprocess.Popen(command, env=environment)
    with view.watching():
        status = _wait(process)
    view.summarize()
    return status


def _wait(process: subprocess.Popen[bytes]) -> int:
    interrupted = False
    while True:
        try:
            status = process.wait()
            return 128 + signal.SIGINT if interrupted else status
        except KeyboardInterrupt:
            # torchrun received the same Ctrl-C and is stopping its workers: wait until it is done.
            interrupted = True


def torchrun_command(arguments: Sequence[str]) -> list[str]:
    """The torchrun command for these arguments: torchrun's flags, then SCRIPT (or -m MODULE) and its arguments.

    torchrun's own parser finds where its flags end. The plan is read here, so that an unusable one is
    rejected before any process starts.
    """
    parsed = parse(arguments)
    if parsed.no_python:
        raise TrimtabError("run: with --no-python there is no Python script to adjust; use torchrun")
    if not parsed.module and not Path(parsed.training_script).is_file():
        raise TrimtabError(f"run: there is no script {parsed.training_script!r} in {Path.cwd()}")
    _check_ranks(parsed.nproc_per_node, parsed.nnodes)
    rest = len(parsed.training_script_args)
    flags = list(arguments[: len(arguments) - rest - 1])
    script = [parsed.training_script]
    settings = _settings(parsed)
    flags = _without_own(flags)
    if parsed.max_restarts and parsed.nnodes == "1" and _has_default_rendezvous(parsed):
        # A fixed port's store outlives the ranks, and Gloo finds the dead ones' addresses in it.
        flags = ["--standalone", *flags]
    if parsed.module:
        flags = [flag for flag in flags if flag not in ("-m", "--module")]
        script = ["-m", *script]
    return [
        *(sys.executable, "-m", "trimtab.cli.agent"),
        *flags,
        *("-m", BOOTSTRAP),
        *settings.arguments(),
        *script,
        *parsed.training_script_args,
    ]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The arguments of `trimtab run`, by torchrun's own parser."""
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    parser.prog = "trimtab run"
    parser.description = (
        "Train an unchanged script as torchrun does; gradients of its DistributedDataParallel modules are sent "
        "in fewer bits where that pays, and its batches are divided by the ranks' speeds where that changes no result. "
        "The flags are torchrun's, plus those at the end. With --max-restarts "
        "N ranks that are lost are started again; with --nnodes MIN:MAX nodes may leave and join, and the plan is made "
        "anew for those that are there. With TRIMTAB_DISABLE=1 this is plain torchrun."
    )
    for flag, options in OPTIONS.items():
        parser.add_argument(flag, **options)
    parser.error = _refuse  # type: ignore[method-assign]
    return parser.parse_args(list(arguments))


def _settings(parsed: argparse.Namespace) -> RunSettings:
    """Our own options; what is wrong with them is said here, before any process starts."""
    if parsed.plan is not None:
        _check_plan(parsed.plan, parsed.nproc_per_node, parsed.nnodes)
    if parsed.local_steps is not None:
        _check_local_steps(parsed.local_steps, parsed.plan, parsed.max_penalty)
    if parsed.local_steps != "auto" and parsed.max_penalty != RunSettings.max_penalty:
        raise TrimtabError(
            "run: --max-penalty says how --local-steps auto chooses; give that too, or leave it out"
        )
    adjust = _adjust(parsed)
    _check_batch_sizes(parsed, adjust)
    return RunSettings(
        plan=None if parsed.plan is None else str(Path(parsed.plan).resolve()),
        local_steps=parsed.local_steps,
        max_penalty=parsed.max_penalty,
        adjust=adjust,
        auto=parsed.auto or (parsed.plan is None and "precision" in selected(adjust)),
        batch_sizes=parsed.batch_sizes,
    )


def _adjust(parsed: argparse.Namespace) -> str:
    """What may be adjusted; options that contradict each other are refused."""
    chosen: str | None = parsed.adjust
    if parsed.auto and parsed.plan is not None:
        raise TrimtabError("run: --auto and --plan exclude each other: one makes the plan that the other has")
    if (parsed.auto or chosen is not None) and parsed.local_steps is not None:
        raise TrimtabError(
            f"run: --local-steps and {'--auto' if parsed.auto else '--adjust'} exclude each other: ranks that train by "
            "themselves exchange no gradients; --batch-sizes says how their batches are cut"
        )
    if chosen is None:
        return "auto" if parsed.auto or parsed.plan is not None else RunSettings.adjust
    try:
        allowed = selected(chosen)
    except TrimtabError as error:
        raise TrimtabError(f"run: --{error}") from None
    if not allowed and (parsed.auto or parsed.plan is not None):
        made = "--auto" if parsed.auto else "--plan"
        raise TrimtabError(f"run: {made} and --adjust none exclude each other: a plan adjusts something")
    return chosen


def _check_plan(path: str, per_node: str, nodes: str) -> None:
    """Reject a plan that is unreadable, from another version, or for another world size (where that is known)."""
    import trimtab
    from trimtab.control.plans.present_ranks import require_world_size
    from trimtab.planning.plan import load_plan

    plan = load_plan(path)
    if plan.trimtab != trimtab.__version__:
        raise TrimtabError(
            f"run: {path} was made by trimtab {plan.trimtab}, and this is {trimtab.__version__}; make a new plan "
            "with `trimtab plan`"
        )
    ranks = _known_ranks(per_node, nodes)
    if ranks is not None:
        try:
            require_world_size(plan, ranks)
        except TrimtabError as error:
            raise TrimtabError(f"run: {path}: {error}") from None


def _check_batch_sizes(parsed: argparse.Namespace, adjust: str) -> None:
    from trimtab.control.shares.sizes import parse_sizes

    sizes = parse_sizes(parsed.batch_sizes)
    if parsed.batch_sizes != "auto" and selected(adjust) == {"shares"} and (sizes is None or parsed.auto):
        raise TrimtabError(
            f"run: --batch-sizes {parsed.batch_sizes} and --adjust {adjust} exclude each other: one fixes what the "
            "other adjusts"
        )
    if sizes is None:
        return
    if parsed.plan is not None:
        raise TrimtabError(
            f"run: --batch-sizes {parsed.batch_sizes} and --plan exclude each other: both say what each rank does"
        )
    if "shares" not in selected(adjust):
        raise TrimtabError(
            f"run: --batch-sizes {parsed.batch_sizes} sets batch shares, and --adjust {adjust} leaves them alone"
        )
    ranks = _known_ranks(parsed.nproc_per_node, parsed.nnodes)
    if ranks is not None and len(sizes) != ranks:
        raise TrimtabError(
            f"run: --batch-sizes {parsed.batch_sizes} has {len(sizes)} sizes for {ranks} ranks; give one for each"
        )


def _known_ranks(per_node: str, nodes: str) -> int | None:
    """The number of ranks, where the flags say it."""
    fewest, _, most = str(nodes).partition(":")
    return int(per_node) * int(fewest) if str(per_node).isdecimal() and fewest == (most or fewest) else None


def _has_default_rendezvous(parsed: argparse.Namespace) -> bool:
    """Whether torchrun's flags leave open where the nodes meet."""
    from torch.distributed.run import get_args_parser

    names = ("standalone", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "master_addr", "master_port")
    default = get_args_parser().parse_args(["script"])
    return all(getattr(parsed, name) == getattr(default, name) for name in names)


def _check_ranks(per_node: str, nodes: str) -> None:
    """Reject numbers of ranks and nodes that torchrun would end on with a traceback."""
    from torch.distributed.run import determine_local_world_size, parse_min_max_nnodes

    try:
        if determine_local_world_size(per_node) < 1:
            raise ValueError
    except ValueError as error:
        hint = f" ({error})" if per_node in ("gpu", "xpu") else ""
        raise TrimtabError(
            f"run: --nproc-per-node {per_node}: give a number of ranks of at least 1, or auto, cpu or gpu{hint}"
        ) from None
    try:
        fewest, most = parse_min_max_nnodes(nodes)
    except (ValueError, RuntimeError):
        fewest, most = 0, 0
    if not 1 <= fewest <= most:
        raise TrimtabError(
            f"run: --nnodes {nodes}: give a number of nodes of at least 1, or a range such as 1:4"
        )


def _check_local_steps(every: str, plan: str | None, max_penalty: float) -> None:
    from trimtab.planning.local_steps import require_penalty

    require_penalty("run", max_penalty)
    if every != "auto" and not (every.isdecimal() and int(every) > 0):
        raise TrimtabError(f"run: --local-steps {every}: give a number of steps of at least 1, or auto")
    if plan is not None:
        raise TrimtabError(
            "run: --local-steps and --plan exclude each other: a plan exchanges gradients in every step"
        )


def _without_own(flags: Sequence[str]) -> list[str]:
    """torchrun's flags, without ours and their values."""
    kept: list[str] = []
    own_value = False
    for flag in flags:
        if own_value:
            own_value = False
            continue
        name, equals, _ = flag.partition("=")
        own = _own_option(name)
        if own is None:
            kept.append(flag)
        elif not equals:
            own_value = OPTIONS[own].get("action") != "store_true"
    return kept


def _own_option(name: str) -> str | None:
    """Which of our options this is, perhaps abbreviated; the parser has refused what could be several."""
    from torch.distributed.run import get_args_parser

    if name in OPTIONS:
        return name
    if not name.startswith("--") or name == "--" or name in get_args_parser()._option_string_actions:
        return None
    return next((option for option in OPTIONS if option.startswith(name)), None)


def _suggestion(typed: str) -> str:
    """The option that an unknown one may stand for; ours are written with hyphens only, as in the docs."""
    from torch.distributed.run import get_args_parser

    name = typed.partition("=")[0]
    known = [*OPTIONS, *get_args_parser()._option_string_actions]
    close = difflib.get_close_matches(name.replace("_", "-"), known, 1, cutoff=0.8)
    return f" (did you mean {close[0]}?)" if close else ""


def _refuse(message: str) -> NoReturn:
    if "training_script" in message:
        message = "no script"
    if message.startswith("unrecognized arguments: "):
        message += _suggestion(message.partition(": ")[2].split()[0])
    raise TrimtabError(
        f"run: {message}; write: trimtab run --nproc-per-node 4 SCRIPT ARGS (see trimtab run --help)"
    )
