"""Exchanges a text between the ranks of a group through the store: a rank that does not take part is named."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from trimtab.errors import TrimtabError

_calls: WeakKeyDictionary[dist.ProcessGroup, dict[str, int]] = WeakKeyDictionary()
"""Number of calls for each group and purpose: the same on every rank that always takes part."""


def announce(group: dist.ProcessGroup, what: str, text: str) -> tuple[Any, list[str]]:
    """Publish `text` to the group without waiting for the others: the first half of `roll_call`.

    Returns the store and the keys, by rank, under which the ranks publish theirs.
    """
    # The group's own attribute is its backend's, which a view of the group shares, on some ranks under another name.
    name = dist.distributed_c10d._world.pg_names[group]
    counts = _calls.setdefault(group, {})
    count = counts[what] = counts.get(what, -1) + 1
    # torchrun's own store outlives the ranks. Otherwise it is new with each start, and nodes count theirs differently.
    outlives = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if outlives else "0"
    store = PrefixStore(
        f"trimtab/{attempt}/{name}/{what}/{count}", dist.distributed_c10d._get_default_store()
    )
    keys = [str(rank) for rank in range(group.size())]
    store.set(keys[group.rank()], text)
    return store, keys


def roll_call(group: dist.ProcessGroup, what: str, text: str) -> list[str]:
    """Every rank's `text`, by rank. Every rank of the group calls it for the same `what`.

    Raises:
        TrimtabError: some ranks did not call it within the group's timeout; it names them.
    """
    store, keys = announce(group, what, text)
    timeout = timeout_of(group)
    try:
        store.wait(keys, timeout)
    except RuntimeError as error:  # DistStoreError
        missing = [int(key) for key in keys if not store.check([key])]
        if not missing:
            raise
        raise TrimtabError(
            f"{what}: ranks {missing} have not called it within {timeout.total_seconds():g} s; every rank of the "
            "group must call it, at the same point of the script"
        ) from error
    texts = [store.get(key).decode() for key in keys]
    if store.add("read", 1) == len(keys):  # torch may reuse a destroyed group's name: leave no keys
        for key in [*keys, "read"]:
            store.delete_key(key)
    return texts


def device_of(group: dist.ProcessGroup) -> torch.device:
    """The device of the group's collectives: the CPU if it has a CPU backend, else this rank's GPU."""
    if any(device.type == "cpu" for device in group._device_types):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def timeout_of(group: dist.ProcessGroup, device: torch.device | None = None) -> timedelta:
    """How long the group's collectives wait for a rank."""
    options = getattr(group._get_backend(device or device_of(group)), "options", None)
    timeout: timedelta = (
        options._timeout
        if options is not None
        else dist.distributed_c10d._get_default_timeout(dist.Backend("gloo"))
    )
    return timeout
