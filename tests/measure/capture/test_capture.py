from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from tests.measure.capture.models import MODELS, Loss, Peeks, batch_for
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from trimtab.api.set_precision import set_precision
from trimtab.errors import TrimtabError
from trimtab.measure.capture.capture import capture_workload
from trimtab.precision.operators import operators
from trimtab.precision_names import ATTENTION
from trimtab.workload import OUTSIDE, Workload, load_workload, save_workload

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.pool import Pool


def captured(name: str, size: int = 2, **options: Any) -> Workload:
    with torch.device("meta"):
        model = MODELS[name]()
    return capture_workload(model, batch_for(name, size), **options)


def saved_by_autograd(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> int:
    """Bytes that a real forward pass keeps, parameters and buffers left out."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and storage.nbytes():
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = model(*batch)
    del loss
    return sum(kept.values())


def saved_by_workload(workload: Workload, buffers: int = 0) -> int:
    sizes = {s.storage: s.tensor.nbytes for o in workload.operators for s in o.saved}
    return sum(sizes.values()) - buffers


@pytest.mark.parametrize("name", MODELS)
def test_what_is_captured_is_what_runs(name: str) -> None:
    torch.manual_seed(0)
    model, batch = MODELS[name](), batch_for(name, 3)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    random = torch.random.get_rng_state()
    workload = capture_workload(model, batch)
    assert torch.equal(random, torch.random.get_rng_state())
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    with FlopCounterMode(display=False) as counter:
        loss = model(*batch)
        forward = counter.get_total_flops()
        loss.backward()
        both = counter.get_total_flops()
    products = [o for o in workload.operators if o.kind in ("linear", "conv", "matmul", "attention")]
    # The counter does not know every kernel of attention: a CPU's without dropout counts nothing.
    counted = [o for o in products if o.kind != "attention" or name in ("gpt2", "bert")]
    assert sum(o.flops for o in counted) == forward
    if name != "conv":  # the counter takes the gradient of a grouped kernel for that of a full one
        assert sum(o.backward_flops for o in counted) == pytest.approx(both - forward, rel=0.15)
    buffers = 4 * sum(2 * m.num_features for m in model.modules() if isinstance(m, nn.BatchNorm2d))
    assert saved_by_workload(workload, buffers) == pytest.approx(saved_by_autograd(model, batch), rel=0.01)


@pytest.mark.parametrize("name", MODELS)
def test_names_are_those_of_set_precision(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    workload = capture_workload(model, batch_for(name, 2))
    modules = {
        s: workload.operators[i[0]].kind for s, i in workload.settings.items() if not s.endswith(ATTENTION)
    }
    used = {n: k for n, k in operators(model).items() if n in modules}
    assert modules == used
    assert set(operators(model)) - set(used) <= {"places"}  # of which only the weight is used
    attention = [s for s in workload.settings if s.endswith(ATTENTION)]
    assert bool(attention) == (name in ("gpt", "gpt2", "llama", "bert", "vit"))
    if attention:
        set_precision(model, dict.fromkeys(attention, "bf16"))  # each of them is known there


@pytest.mark.parametrize("name", MODELS)
def test_another_batch_size_is_derived(name: str) -> None:
    torch.manual_seed(0)
    workload = captured(name, 2)
    assert workload.resizable
    derived, direct = workload.at_batch(5), captured(name, 5)
    for one, two in zip(derived.operators, direct.operators, strict=True):
        assert (one.target, one.inputs, one.input_tensors, one.outputs) == (
            two.target, two.inputs, two.input_tensors, two.outputs
        )  # fmt: skip
        assert one.flops == two.flops
        assert [s.tensor for s in one.saved] == [s.tensor for s in two.saved]
    assert derived.batch == direct.batch
    assert derived.at_batch(2) == workload


@pytest.mark.parametrize("name", ["gpt", "torch_gpt", "llama"])
def test_a_batch_of_one_can_grow(name: str) -> None:
    workload = captured(name, 1)
    assert workload.batch_size == 1
    grown = workload.at_batch(3)
    assert sum(o.flops for o in grown.operators) == sum(o.flops for o in captured(name, 3).operators)


def test_products_can_be_set_however_they_are_written_but_constants_cannot() -> None:
    class Spelled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                angles = torch.arange(5.0)[:, None] @ torch.ones(1, 8)
            return torch.baddbmm(angles, torch.einsum("bid,bjd->bij", x, x), batch2=x)

    model = nn.Sequential(nn.Linear(8, 8), Spelled())
    workload = capture_workload(model, torch.randn(3, 5, 8))
    products = [workload.operators[i].target for i in workload.settings["1" + ATTENTION]]
    assert products == ["aten.bmm.default", "aten.baddbmm.default"]


def test_edges_lead_to_who_made_the_value() -> None:
    workload = captured("gpt")
    by_name = workload.by_name
    attention = by_name["blocks.0/attention"]
    assert [workload.operators[i].name for i in attention.inputs] == ["blocks.0.qkv"] * 3
    assert attention.arguments["causal"] is True
    residual = by_name["blocks.0/add"]
    assert [workload.operators[i].name for i in residual.inputs] == ["add", "blocks.0.out"]
    assert by_name["tokens"].inputs == (OUTSIDE,)
    assert (
        by_name["blocks.0.qkv"].index in workload.consumers[by_name["blocks.0.norm1/native_layer_norm"].index]
    )


def test_an_operator_in_place_becomes_the_maker() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.two(F.relu(self.one(x), inplace=True))
            return y

    workload = capture_workload(InPlace(), torch.zeros(2, 4))
    assert [o.name for o in workload.operators] == ["one", "relu", "two"]
    assert workload.by_name["two"].inputs == (workload.by_name["relu"].index,)


def test_shared_weights_are_one_parameter_used_twice() -> None:
    workload = captured("gpt2", bucket_cap_mb=0.05)
    (tied,) = [p for p in workload.parameters if len(p.operators) > 1]
    assert tied.name == "model.transformer.wte.weight"
    assert [workload.operators[i].kind for i in tied.operators] == ["embedding", "linear"]
    first = workload.buckets[0].parameters
    assert tied.name not in first  # its gradient is complete only when backward reaches the embedding
    assert workload.by_name["model.transformer.h.0.attn.c_attn"].arguments == {"turned": True}


def test_one_module_called_twice_is_two_operators_under_one_setting() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.layer(self.layer(x))
            return y

    workload = capture_workload(Twice(), torch.zeros(2, 4))
    assert workload.settings == {"layer": (0, 1)}
    assert [o.name for o in workload.operators] == ["layer", "layer.1"]


def test_autocast_shows_in_types_and_in_what_is_saved() -> None:
    plain, lowered = captured("gpt"), captured("gpt", autocast="bf16")
    up = lowered.by_name["blocks.0.up"]
    assert up.outputs[0].dtype == "bf16"
    assert {s.role for s in up.saved} == {"input", "weight"}
    assert {s.tensor.dtype for s in up.saved} == {"bf16"}
    assert plain.by_name["blocks.0.up"].outputs[0].dtype == "fp32"


def test_frozen_parameters_have_no_bucket_and_no_backward() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    model[0].requires_grad_(False)
    workload = capture_workload(model, torch.zeros(2, 4))
    assert [o.differentiable for o in workload.operators] == [False, True]
    assert workload.operators[0].backward_flops == 0
    assert [b.parameters for b in workload.buckets] == [("1.bias", "1.weight")]
    assert not workload.operators[0].saved


def test_a_loss_may_follow_the_model() -> None:
    workload = capture_workload(nn.Linear(4, 2), torch.zeros(3, 4), loss=lambda y: y.square().mean())
    assert [o.kind for o in workload.operators[1:]] == ["activation", "reduce"]


def test_a_model_that_looks_at_values_is_refused_by_name_and_runs_for_real() -> None:
    model, x = Peeks(), torch.ones(2, 8)
    with pytest.raises(TrimtabError, match=r"Peeks did not run on fake tensors.*real=True"):
        capture_workload(model, x)
    workload = capture_workload(model, x, real=True)
    assert "one" in workload.settings
    assert "two" not in workload.settings
    assert workload.at_batch(3).by_name["one"].input_tensors[0].shape == (3, 8)


def test_a_real_run_changes_nothing_either() -> None:
    torch.manual_seed(0)
    model, batch = MODELS["conv"](), batch_for("conv", 2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    real, fake = capture_workload(model, batch, real=True), capture_workload(model, batch)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [o.target for o in real.operators] == [o.target for o in fake.operators]
    assert saved_by_workload(real) == saved_by_workload(fake)


def test_an_operator_may_be_given_its_input_by_name() -> None:
    model, inputs = nn.Linear(3, 4), torch.randn(2, 3)
    by_name = capture_workload(model, {"input": inputs}, loss=lambda y: y.sum())
    assert by_name.operators == capture_workload(model, (inputs,), loss=lambda y: y.sum()).operators
    assert [tensor.shape for tensor in by_name.operators[0].input_tensors] == [(2, 3)]


def test_bad_input_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    set_precision(model, {"0": "bf16"})
    with pytest.raises(TrimtabError, match=r"set_precision has changed 0.*capture it first"):
        capture_workload(model, torch.zeros(2, 4))
    set_precision(model, {})
    with pytest.raises(TrimtabError, match="has no tensor with an axis"):
        capture_workload(model, {"x": 3})
    with pytest.raises(TrimtabError, match="autocast is 'bf16' or 'fp16'"):
        capture_workload(model, torch.zeros(2, 4), autocast="int8")
    with pytest.raises(TrimtabError, match="did not run"):
        capture_workload(model, torch.zeros(2, 5))
    if not torch.cuda.is_available():
        with pytest.raises(TrimtabError, match="torch finds no CUDA device"):
            capture_workload(model, torch.zeros(2, 4), device="cuda")


def test_a_large_model_needs_no_memory() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(use_cache=False, num_hidden_layers=4))
    workload = capture_workload(Loss(model), (torch.zeros(1, 2048, dtype=torch.long),) * 2)
    assert sum(p.tensor.nbytes for p in workload.parameters) > 4e9
    (block,) = workload.blocks
    assert block.modules == tuple(f"model.model.layers.{i}" for i in range(4))


def test_file_is_read_back_equal_and_without_torch(tmp_path: Path) -> None:
    workload = captured("gpt2")
    path = tmp_path / "workload.json"
    save_workload(workload, path)
    assert load_workload(path) == workload
    code = (
        "import sys; from trimtab.workload import load_workload; w = load_workload(sys.argv[1]).at_batch(7);"
        "assert sum(o.flops for o in w.operators) > 0; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, env=dict(os.environ), timeout=60)
    tree = json.loads(path.read_text())
    for change, message in (
        ({"version": 7}, "version mismatch: found 7, expected 1; capture the model again"),
        ({"batch_size": 0}, "batch_size"),
        ({"extra": 1}, "extra"),
    ):
        path.write_text(json.dumps(tree | change))
        with pytest.raises(TrimtabError, match=message):
            load_workload(path)
    tree["operators"][5]["inputs"] = [99]
    path.write_text(json.dumps(tree))
    with pytest.raises(TrimtabError, match="must be operators before it"):
        load_workload(path)
    path.write_text("{")
    with pytest.raises(TrimtabError, match="not valid JSON"):
        load_workload(path)
    with pytest.raises(TrimtabError, match="cannot be read"):
        load_workload(tmp_path / "none.json")


def _ddp_buckets(name: str, cap: float | None) -> list[list[str]]:
    torch.manual_seed(0)
    model = MODELS[name]()
    options: dict[str, Any] = {} if cap is None else {"bucket_cap_mb": cap}
    ddp = DistributedDataParallel(model, **options)
    names = {id(p): n for n, p in model.named_parameters()}
    seen: list[list[str]] = []

    def hook(state, bucket):  # type: ignore[no-untyped-def]
        seen.append([names[id(p)] for p in bucket.parameters()])
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ddp.register_comm_hook(None, hook)
    for _ in range(3):
        seen.clear()
        ddp(*batch_for(name, 2)).backward()
    return seen


@pytest.mark.parametrize(("name", "cap"), [("gpt", 0.05), ("gpt2", None), ("conv", 0.01)])
def test_buckets_are_those_of_ddp(ranks: Pool, name: str, cap: float | None) -> None:
    torch.manual_seed(0)
    real = ranks(1, _ddp_buckets, name, cap)[0]
    mine = captured(name, bucket_cap_mb=cap).buckets
    assert [sorted(b) for b in real] == [sorted(b.parameters) for b in mine]
