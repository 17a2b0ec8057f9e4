"""`trimtab.local_steps` and `trimtab.agreed_weights`: workers that agree on their weights now and then."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trimtab import environment
from trimtab.control.local_steps import LocalSteps
from trimtab.control.local_workers import WhoWorks
from trimtab.control.rank_values import rank_and_world_size
from trimtab.control.running_local_steps import local_steps_of
from trimtab.control.sharded_waits import is_sharded
from trimtab.errors import TrimtabError
from trimtab.model_state import attach_state
from trimtab.planning.local_steps import MAX_PENALTY, default_delay, require_penalty

Model = TypeVar("Model", bound=nn.Module)


def local_steps(
    model: Model,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    every: int | Literal["auto"] = "auto",
    max_penalty: float = MAX_PENALTY,
    bits: int | Literal["auto"] | None = "auto",
    outer_lr: float | None = None,
    outer_momentum: float | None = None,
    fragments: int | None = None,
    delay: int | None = None,
    patience: int | None = None,
    keep: float | None = None,
    workers: WhoWorks = "auto",
    seed: int = 0,
    group: dist.ProcessGroup | None = None,
) -> Model:
    """Let every rank train by itself, and agree on the weights every so many steps; in place, and returns the model.

    For links on which sending the gradients of every step is hopeless. Every rank (or host) is a worker: it takes steps
    with its own optimizer, and every `every` steps what it changed is averaged over the workers, in a few bits, while
    training goes on. Training is not that of DDP; see docs/local-steps.md for when not to use it.

    ::

        trimtab.local_steps(model, optimizer)
        for batch in data: ...                       # the loop as it is
        with trimtab.agreed_weights(model):
            evaluate(model)

    Args:
        model: a plain module, or one in DistributedDataParallel, whose own communication stops.
        optimizer: is checked for the model's parameters; otherwise any that has them counts.
        every: steps of a round; "auto" measures a few steps and the link, and takes the shortest round that hides the
            exchange. Where exchanging every step is as fast, a DDP module goes back to that, with compressed gradients.
        max_penalty: with "auto", the expected relative increase of the loss that is allowed. While training, it follows
            how far the changes of workers agree: where they agree too little, rounds become shorter, or a DDP module
            goes back to exchanging every step.
        bits: of what is exchanged; None for uncompressed.
        outer_lr, outer_momentum: of the outer Nesterov step; by default 0.7 and 0.5.
        fragments: groups of parameters that are exchanged one after another.
        delay: steps between sending a fragment and taking its average.
        patience: steps by which a fragment that has not arrived may be taken later; a run in which that happens is not
            reproducible.
        keep: the part of its own change during the delay that a worker keeps when it takes the average; by default all.
        workers: "hosts" lets ranks of one host average their gradients in every step, exactly, and hosts agree every
            `every` steps; "ranks" makes every rank a worker. "auto" takes hosts where there are several with several
            ranks, and the model is in DDP.
        group: the ranks; by default DDP's, or all ranks.
    """
    if not isinstance(model, nn.Module):
        raise TrimtabError(f"local_steps: expected an nn.Module, got {type(model).__name__}")
    if local_steps_of(model) is not None:
        raise TrimtabError("local_steps: this model has local steps already; call it once")
    if is_sharded(model):
        raise TrimtabError(
            "local_steps: the ranks share one copy of this model (FSDP2), so none can train by itself; use a plain or "
            "DDP module, or trimtab.compress(model)"
        )
    if every != "auto" and (not isinstance(every, int) or every < 1):
        raise TrimtabError(f"local_steps: every={every!r}: use a number of steps of at least 1, or 'auto'")
    require_penalty("local_steps", max_penalty)
    if workers not in ("auto", "ranks", "hosts"):
        raise TrimtabError(f"local_steps: workers={workers!r}: use 'ranks', 'hosts' or 'auto'")
    if not (optimizer is None or isinstance(getattr(optimizer, "param_groups", None), list)):
        raise TrimtabError(
            f"local_steps: expected the optimizer that steps the model, got {type(optimizer).__name__}"
        )
    parameters = {id(p) for p in model.parameters()}
    if optimizer is not None and not any(
        id(p) in parameters for own in optimizer.param_groups for p in own["params"]
    ):
        raise TrimtabError("local_steps: the optimizer has none of the model's parameters")
    if environment.disabled():
        return model
    _, world_size = rank_and_world_size(group, "local_steps")
    if world_size == 1:
        attach_state(model).explanation = "local steps: one worker: there is nobody to agree with"
        return model
    if group is None:
        group = model.process_group if isinstance(model, DistributedDataParallel) else dist.group.WORLD
    assert group is not None
    given = {
        "bits": bits,
        "outer_lr": outer_lr,
        "outer_momentum": outer_momentum,
        "fragments": fragments,
        "delay": delay,
        "patience": patience,
        "keep": keep,
    }
    changes: dict[str, Any] = {
        key: value for key, value in given.items() if value is not None or (key == "bits" and bits is None)
    }
    if changes.get("bits") == "auto":
        del changes["bits"]
    if fragments is not None and delay is None and isinstance(every, int):
        changes["delay"] = default_delay(every, fragments)
    attach_state(model).local_steps = LocalSteps(
        model,
        group,
        every=None if every == "auto" else every,
        max_penalty=max_penalty,
        seed=seed,
        changes=changes,
        who=workers,
    )
    return model


@contextmanager
def agreed_weights(model: nn.Module, *, now: bool = False) -> Iterator[None]:
    """Within it the model has the weights that all workers agreed on last: for evaluation, and for saving the model.

    Not collective, unless `delay` is 0: then every rank calls it. Without local steps it does nothing.

    Args:
        now: first agree on what all workers did until now, and wait for that; then every rank calls it. For the end of
            a training: what was agreed on last is up to a round old.
    """
    steps = local_steps_of(model)
    if steps is not None:
        steps.finish_step(alone=not now)
        if now and steps.worker is not None:
            steps.worker.agree_now()
    with nullcontext() if steps is None or steps.worker is None else steps.worker.agreed_weights():
        yield
