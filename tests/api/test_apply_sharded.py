"""`trimtab.apply` on models of `fully_shard` modules: real ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from tests.control.plans.plan_cases import LINEARS, corpus, net, plan_for, role
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as Ddp

import trimtab
from trimtab.api.apply import apply
from trimtab.api.mesh import mesh as mesh_of
from trimtab.control.compression.fsdp import fsdp_compression_of
from trimtab.control.plans.active_plan import active_plan_of
from trimtab.errors import TrimtabError
from trimtab.precision.setting import precisions_of

if TYPE_CHECKING:
    from tests.support.pool import Pool


def sharded(plan: Any) -> Any:
    model: Any = net()
    mesh = mesh_of(plan)
    part = mesh["dp"] if plan.shard_ranks is None else mesh["replicate", "shard"]
    for module in (model.up, model.middle, model):
        fully_shard(module, mesh=part)
    return model


def trained(changes: dict[str, Any]) -> dict[str, Any]:
    """Some steps under a plan; and the parameters that plain steps on the whole batch lead to."""
    plan = plan_for(net(), wrapper="fsdp", **changes)
    model = sharded(plan)
    assert apply(model, plan) is model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = trimtab.loader(corpus(32), plan.batch_size, plan=model, shuffle=False)
    assert data._adjust is None, "a rank's own time is not known"
    alone = net()
    reference = torch.optim.SGD(alone.parameters(), lr=0.1)
    sizes = []
    for step, (batch,) in enumerate(data):
        sizes.append(len(batch))
        data.weigh((model(batch) - batch).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        whole = corpus(32).tensors[0][step * plan.batch_size : (step + 1) * plan.batch_size]
        (alone(whole) - whole).square().mean().backward()
        reference.step()
        reference.zero_grad()
    compression = fsdp_compression_of(model)
    got = torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()])
    want = torch.cat([p.detach().flatten() for p in alone.parameters()])
    start = torch.cat([p.detach().flatten() for p in net().parameters()])
    return {
        "sizes": sizes,
        "lowered": {name: str(p) for name, p in precisions_of(model).items()},
        "bits": None if compression is None else {bits for _, bits, _ in compression.pieces.values()},
        "weight_bits": None if compression is None else compression.weight_bits,
        "error": float((got - want).norm() / (want - start).norm()),
        "explained": trimtab.explain(model),
    }


def test_shares_and_bits_of_a_plan_for_fsdp(ranks: Pool) -> None:
    roles = {"fast": role("A", 5), "slow": role("B", 3)}
    plain = ranks(2, trained, {"roles": roles}, allow_groups=True)
    assert [set(one["sizes"]) for one in plain] == [{5}, {3}]
    for one in plain:
        assert one["bits"] is None
        assert one["error"] < 1e-5
        assert "gradients are not compressed" in one["explained"]
    packed = ranks(2, trained, {"roles": roles, "bits": 8}, allow_groups=True)
    for one in packed:
        assert one["bits"] == {0, 8}
        assert 1e-6 < one["error"] < 0.05
        assert one["weight_bits"] is None
        assert "gradients in 8 bits" in one["explained"]
    for one in ranks(2, trained, {"roles": roles, "bits": 8, "weight_bits": 8}, allow_groups=True):
        assert one["weight_bits"] == 8
        assert 1e-6 < one["error"] < 0.1
        assert "gradients in 8 bits, weights in 8" in one["explained"]


def test_precisions_of_a_sharded_model(ranks: Pool) -> None:
    roles = {"fast": role("A", 4), "slow": role("B", 4, middle="bf16")}
    one, other = ranks(2, trained, {"roles": roles}, allow_groups=True)
    assert one["lowered"] == {}
    assert other["lowered"] == {"middle": "bf16"}
    assert 1e-5 < one["error"] < 0.05


def hybrid() -> tuple[float, set[int] | None, tuple[int, ...]]:
    roles = {"a": role("a", 2)}
    outcome = trained({"roles": roles, "ranks": (("a", 4),), "shard_ranks": 2, "bits": 8})
    plan = plan_for(net(), wrapper="fsdp", roles=roles, ranks=(("a", 4),), shard_ranks=2)
    return outcome["error"], outcome["bits"], tuple(mesh_of(plan).shape)


def test_hsdp(ranks: Pool) -> None:
    for error, bits, shape in ranks(4, hybrid, allow_groups=True):
        assert error < 0.05
        assert bits == {0, 8}
        assert shape == (2, 2, 1)


def refusals() -> dict[str, str]:
    messages = {}

    def refused(name: str, model: Any, plan: Any) -> None:
        try:
            apply(model, plan)
        except TrimtabError as error:
            messages[name] = str(error)
        assert all(not precisions_of(model).get(operator) for operator in LINEARS)

    roles = {"fast": role("A", 4, up="bf16"), "slow": role("B", 4, up="bf16")}
    fsdp, ddp = (plan_for(net(), wrapper=wrapper, roles=roles) for wrapper in ("fsdp", "ddp"))
    refused("ddp module", Ddp(net()), fsdp)
    refused("sharded module", sharded(fsdp), ddp)
    one_copy_each = plan_for(net(), wrapper="fsdp", roles=roles, shard_ranks=1)
    refused("other ways", sharded(fsdp), one_copy_each)
    # One rank has the wrong module: nobody starts.
    wrapped = Ddp(net())
    refused("on rank 1", wrapped if dist.get_rank() else wrapped.module, fsdp)
    refused("adaptive", sharded(fsdp), plan_for(net(), wrapper="fsdp", roles=roles, bits="adaptive"))
    return messages


def test_another_wrapper_is_refused_on_all_ranks_with_the_way_out(ranks: Pool) -> None:
    way = "torch.distributed.fsdp.fully_shard(model, mesh=trimtab.mesh(plan)['dp'])"
    for messages in ranks(2, refusals, allow_groups=True):
        assert way in messages["ddp module"]
        assert "DistributedDataParallel(model)" in messages["sharded module"]
        assert "over 1 ranks, and it is sharded over 2" in messages["other ways"]
        assert way in messages["on rank 1"]
        assert "adapt" in messages["adaptive"]


def other_meshes() -> dict[str, str]:
    roles = {"a": role("a", 2)}
    plan = plan_for(net(), wrapper="fsdp", roles=roles, ranks=(("a", 4),), shard_ranks=2)
    as_planned = mesh_of(plan)
    meshes = {
        "copies apart": as_planned["shard"],
        "across hosts": DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("replicate", "shard")),
    }
    messages = {}
    for name, mesh in meshes.items():
        model: Any = net()
        fully_shard(model, mesh=mesh)
        with pytest.raises(TrimtabError) as error:
            apply(model, plan)
        messages[name] = str(error.value)
        assert active_plan_of(model) is None
    return messages


def test_copies_that_are_not_averaged_and_shards_of_other_ranks_are_refused(ranks: Pool) -> None:
    for messages in ranks(4, other_meshes, allow_groups=True):
        assert "for 4 ranks that train one model, and only 2 of them average" in messages["copies apart"]
        assert "over 2 ranks in a row, and it is sharded over ranks [" in messages["across hosts"]
        assert all("trimtab.mesh(plan)['replicate', 'shard']" in message for message in messages.values())


def other_weight_bits() -> str:
    plan = plan_for(net(), wrapper="fsdp", bits=4, weight_bits=8)
    model = apply(sharded(plan), plan)
    with pytest.raises(TrimtabError) as error:
        apply(model, replace(plan, weight_bits=None))
    return str(error.value)


def test_other_bits_of_weights_are_refused_as_other_bits_of_gradients_are(ranks: Pool) -> None:
    for message in ranks(2, other_weight_bits, allow_groups=True):
        assert "to 4 bits, weights in 8, and the new one to 4 bits" in message
