"""What `trimtab run` does to a script, from inside a process that another launcher started.

Lightning, Transformers, Accelerate and Ray build DDP and data loaders out of the script's sight. Under `trimtab run`
they need nothing; under another launcher one line of theirs calls `enable`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any


@contextmanager
def needs_extra(name: str) -> Iterator[None]:
    """Imports of a framework that may be missing: the error then says how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"trimtab.frameworks.{name}: {error.name} is not installed; pip install 'trimtab[{name}]'",
            name=error.name,
        ) from None


def enable(**options: Any) -> None:
    """From here on DDP and data loaders of this process are adjusted as under `trimtab run`; collective by their use.

    Nothing happens under `trimtab run`, whose own options count, at a second call, or with TRIMTAB_DISABLE=1.

    Args:
        options: those of `trimtab run`: ``plan="plan.json"``, ``local_steps="auto"``, ...
    """
    from trimtab import backend
    from trimtab.cli.take_overs import take_over_process
    from trimtab.errors import TrimtabError
    from trimtab.run_settings import RunSettings

    known = [field.name for field in fields(RunSettings)]
    for name in options.keys() - {*known}:
        raise TrimtabError(f"enable: there is no option {name!r}; there are {', '.join(known)}")
    backend.register()
    take_over_process(RunSettings(**options))
