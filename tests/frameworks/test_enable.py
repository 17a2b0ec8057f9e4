"""What frameworks call, without a process group: once for a process, with the options of `trimtab run`."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys

import pytest

from trimtab.errors import TrimtabError
from trimtab.frameworks import enable

ONCE = """
from torch.nn.parallel import DistributedDataParallel
before = DistributedDataParallel.__init__
import trimtab.frameworks.lightning, trimtab.frameworks.transformers
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry
assert STRATEGY_REGISTRY.get("trimtab").__class__.__name__ == "FabricTrimtabStrategy"
assert StrategyRegistry.get("trimtab").strategy_name == "trimtab"
assert DistributedDataParallel.__init__ is before, "importing changes nothing but the registries"
trimtab.frameworks.transformers.TrimtabCallback()
first = DistributedDataParallel.__init__
assert {changed} == (first is not before)
trimtab.frameworks.enable(local_steps="auto")
assert DistributedDataParallel.__init__ is first
"""

OLD_NAME = """
import sys
{hide}
import pytorch_lightning
import trimtab.frameworks.lightning as door
assert pytorch_lightning.strategies.StrategyRegistry.get("trimtab").strategy_name == "trimtab"
assert issubclass(door.TrimtabStrategy, pytorch_lightning.strategies.DDPStrategy)
pytorch_lightning.Trainer(accelerator="cpu", devices=1, strategy="trimtab", logger=False)
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("hide", ["", "sys.modules['lightning'] = None"], ids=["both", "alone"])
def test_the_other_name_of_lightning(hide: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OLD_NAME.format(hide=hide)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.timeout(300)
@pytest.mark.parametrize("disabled", [False, True])
def test_a_process_is_taken_over_once_and_not_if_disabled(disabled: bool) -> None:
    environment = {**os.environ, "TRIMTAB_DISABLE": str(int(disabled)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", ONCE.format(changed=not disabled)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_an_option_that_does_not_exist_is_named() -> None:
    with pytest.raises(TrimtabError, match=r"no option 'plans'; there are plan, local_steps"):
        enable(plans="plan.json")


@pytest.mark.parametrize("name", ["lightning", "ray", "transformers"])
def test_a_missing_framework_is_named_with_its_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for missing in (name, f"pytorch_{name}"):
        # What another test of this process has imported would be found without asking for its package.
        for loaded in [module for module in sys.modules if module.startswith(f"{missing}.")]:
            monkeypatch.delitem(sys.modules, loaded)
        monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, f"trimtab.frameworks.{name}", raising=False)
    with pytest.raises(ModuleNotFoundError, match=rf"pip install 'trimtab\[{name}\]'"):
        importlib.import_module(f"trimtab.frameworks.{name}")
