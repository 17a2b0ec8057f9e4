"""`trimtab run` on FSDP2 scripts that do not know it: compressed, recorded, under a plan, or left alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.control.plans.plan_cases import net, plan_for, role

from trimtab.planning.plan import save_plan
from trimtab.report.run_folder import latest_run, load_run

SCRIPT = """
import json, sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from trimtab.model_state import state_of

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
kind = sys.argv[1] if len(sys.argv) > 1 else ""
mesh = init_device_mesh("cpu", (world,))
if kind == "some ranks":
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("stage", "dp"))["dp"]

torch.manual_seed(0)
with torch.device("meta" if kind == "meta" else "cpu"):
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
if kind == "list":
    fully_shard([model[0], model[1]], mesh=mesh)
else:
    fully_shard(model[0], mesh=mesh)
fully_shard(model, mesh=mesh)
if kind == "meta":
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for layer in model:
        layer.reset_parameters()
if kind == "own":
    import trimtab
    from trimtab.codec import Block
    trimtab.compress(model, Block(bits=2), weight_bits=None)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step = torch.compile(model, backend="eager") if kind == "compile" else model
if kind == "evaluated":
    model.eval()
    with torch.no_grad():
        model(torch.zeros(1, 64))
    assert state_of(model).explanation is None
    model.train()
for index in range(6):
    inputs = torch.randn(4, 64, generator=torch.Generator().manual_seed(index * world + rank))
    (step(inputs) - inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
weights = torch.cat([p.full_tensor().flatten() for p in model.parameters()])
said = {"weights": weights.double().tolist(), "explained": state_of(model).explanation}
if state_of(model).fsdp_compression is not None:
    said["bits"] = sorted({bits for _, bits, _ in state_of(model).fsdp_compression.pieces.values()})
    said["weight_bits"] = state_of(model).fsdp_compression.weight_bits
if rank == 0:
    print(json.dumps(said))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def run(
    script: Path, kind: str = "", *flags: str, world: int = 2, **environment: str
) -> tuple[dict[str, Any], str]:
    """What rank 0 printed, and what was said beside that."""
    command = [sys.executable, "-m", "trimtab.cli", "run", "--nproc-per-node", str(world), *flags]
    done = subprocess.run(
        [*command, str(script), kind],
        cwd=script.parent,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def farthest(one: dict[str, Any], other: dict[str, Any]) -> float:
    pairs = zip(one["weights"], other["weights"], strict=True)
    return max((abs(float(a) - float(b)) for a, b in pairs), default=0.0)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the script prints without trimtab, however it shards."""
    path = tmp_path_factory.mktemp("plain") / "train.py"
    path.write_text(SCRIPT)
    return run(path, TRIMTAB_DISABLE="1")[0]


def test_an_unchanged_script_is_compressed_where_it_pays_and_recorded_from_its_first_step(
    script: Path, plain: dict[str, Any]
) -> None:
    own, stderr = run(script, TRIMTAB_RUN_DIR="")
    assert plain["explained"] is None
    assert "shard axis: all ranks are on one host: gradients are summed exactly" in own["explained"]
    assert stderr.count("trimtab: shard axis") == 1
    assert "adjusted nothing" not in stderr
    assert farthest(plain, own) < 1e-5
    folder = load_run(latest_run(script.parent))
    assert folder.ended
    assert [max(step["step"] for step in steps) for steps in folder.steps.values()] == [6, 6]


@pytest.mark.parametrize("kind", ["evaluated", "meta", "compile", "list"])
def test_scripts_that_shard_in_other_ways(script: Path, plain: dict[str, Any], kind: str) -> None:
    """Evaluated before the first step, made without weights, compiled, several modules in one unit."""
    if kind == "meta":  # its weights are drawn shard by shard
        plain, _ = run(script, kind, TRIMTAB_DISABLE="1")
    own, stderr = run(script, kind)
    assert "shard axis: all ranks are on one host" in own["explained"]
    assert stderr.count("shard axis") == 1
    assert farthest(plain, own) < 1e-5


def test_a_script_gets_its_own_way(script: Path) -> None:
    own, stderr = run(script, "own")
    assert own["bits"] == [0, 2]
    assert "as requested" in own["explained"]
    assert stderr.count("axis") == 1
    left, _ = run(script, "", "--adjust", "shares")
    assert left["explained"] is None


def test_a_model_that_some_ranks_share_is_left_alone(script: Path) -> None:
    own, stderr = run(script, "some ranks", world=4)
    assert "sharded over some of the ranks" in own["explained"]
    assert "trimtab.compress(model)" in own["explained"]
    assert stderr.count("gradients are sent as by plain FSDP2") == 1
    assert "bits" not in own


def test_a_plan_for_fsdp(script: Path, tmp_path: Path) -> None:
    roles = {"fast": role("A", 4), "slow": role("B", 4)}
    text = SCRIPT.replace(
        "torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))", "net().float()"
    ).replace("import json,", "from tests.control.plans.plan_cases import net\nimport json,")
    text = text.replace("model[0]", "model.up")
    script.write_text(text)
    plan = plan_for(net(), wrapper="fsdp", roles=roles, bits=8, weight_bits=8)
    save_plan(plan, tmp_path / "plan.json")
    here = str(Path(__file__).parents[2])
    own, stderr = run(script, "", "--plan", str(tmp_path / "plan.json"), PYTHONPATH=here)
    assert own["bits"] == [0, 8]
    assert own["weight_bits"] == 8
    assert "4 samples" in stderr


def test_local_steps_are_refused_or_left_out(script: Path) -> None:
    _, stderr = run(script, "", "--local-steps", "auto")
    assert "gradients are exchanged in every step" in stderr
    assert "shard axis: all ranks are on one host" in stderr
