"""What pages of the docs assume to be there already, made small; their hidden setups call it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from tests.control.plans.plan_cases import corpus, net, plan_for, role
from tests.measure.capture.models import MODELS, batch_for
from tests.predict.profiles import cluster, workload

from trimtab.cluster import save_cluster
from trimtab.planning import save_plan
from trimtab.workload import save_workload

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import nn
    from torch.utils.data import TensorDataset


def model_and_plan(path: str, **changes: Any) -> tuple[nn.Module, TensorDataset]:
    """A model, data for it, and in the file a plan for a fast and a slow rank."""
    model = net()
    if dist.get_rank() == 0:
        roles = {"fast": role("A", 5), "slow": role("B", 3, up="bf16", down="bf16")}
        save_plan(plan_for(model, roles=roles, bits=4, **changes), path)
    dist.barrier()
    return model, corpus(64)


def probed_gpt(path: str) -> None:
    """A cluster file as `trimtab probe` writes it, with figures made up, and workload.json beside it."""
    save_cluster(cluster(), path)
    save_workload(workload(), "workload.json")


def probed_model(path: str) -> tuple[nn.Module, Any, Any, Callable[[torch.Tensor], torch.Tensor]]:
    """A model, a cluster file in which it was probed, two batches and a loss."""
    torch.manual_seed(0)
    probed_gpt(path)
    (sample,) = batch_for("gpt", 2)
    first, second = ((torch.randint(0, 64, sample.shape),) for _ in range(2))
    return MODELS["gpt"](), first, second, lambda output: output


def write_model_file(folder: Path) -> None:
    """models.py: a function that returns a model and a batch, as `--model models:make` asks for."""
    (folder / "models.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "def make():\n"
        "    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))\n"
        "    return model, torch.randn(8, 64), lambda y: y.square().mean()\n"
    )
