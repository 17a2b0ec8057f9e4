"""What each rank should do: pure functions of what was measured.

The package itself is the verb: ``trimtab.plan(model, cluster, batch_size)`` makes a plan, as
`trimtab.runtime.plan` says.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Verb(ModuleType):
    """Importing a package binds its name in its parent, where the verb of the same name would be."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from trimtab.runtime.plan import plan

        return plan(*args, **kwargs)


sys.modules[__name__].__class__ = _Verb
