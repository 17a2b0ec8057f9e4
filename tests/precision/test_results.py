"""What lowered operators hand on, what autograd keeps because of it, and whether the memory model knows."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.measure.capture.models import MODELS, batch_for
from torch import nn
from torch.utils.checkpoint import checkpoint

from trimtab.api.set_precision import set_precision
from trimtab.measure.capture.capture import capture_workload
from trimtab.precision.devices import offers
from trimtab.precision.linear import shares_input
from trimtab.precision_names import Precision
from trimtab.predict.memory.step_peak import step_memory
from trimtab.predict.precision_patterns import with_products

LOW = "int8" if "int8" in offers(torch.device("cpu"))["linear"] else "bf16"
HALF, FULL = torch.bfloat16, torch.float32


class Mixed(nn.Module):
    """Lowered operators beside everything that may follow one: dropout, a norm, a plain layer, a recurrent one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential()
        self.body.up, self.body.gelu = nn.Linear(16, 32), nn.GELU()
        self.body.plain, self.body.down = nn.Linear(32, 32), nn.Linear(32, 16)
        self.head, self.norm = nn.Linear(16, 4), nn.LayerNorm(16)
        self.lstm = nn.LSTM(16, 16, batch_first=True)
        self.checkpointed = self.fails = False

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x)
        if self.fails:
            raise RuntimeError("on purpose")
        z, _ = self.lstm(self.norm(x + y))
        scores = torch.softmax(y @ y.transpose(1, 2), dim=-1)
        return {"logits": self.head(z), "mixed": scores @ y}


def inputs() -> torch.Tensor:
    return torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(1))


def types_seen(model: nn.Module) -> dict[str, tuple[torch.dtype, torch.dtype]]:
    """The types that entered and left each module in one call."""
    seen: dict[str, tuple[torch.dtype, torch.dtype]] = {}
    handles = []
    for name, module in model.named_modules():
        if name and not list(module.children()):

            def note(_module: nn.Module, args: Any, output: Any, name: str = name) -> None:
                first = output[0] if isinstance(output, tuple) else output
                seen[name.rpartition(".")[2]] = args[0].dtype, first.dtype

            handles.append(module.register_forward_hook(note))
    model(inputs())
    for handle in handles:
        handle.remove()
    return seen


def train(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    output = model(inputs())
    loss = output["logits"].square().mean() + output["mixed"].square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def test_a_half_is_handed_on_to_whoever_takes_it_and_fp32_to_whoever_needs_it() -> None:
    model = set_precision(Mixed(), {"*.up": LOW, "*.down": "bf16", "head": LOW})
    seen = types_seen(model)
    assert seen["up"] == (FULL, HALF)
    assert seen["gelu"] == (HALF, HALF)
    assert seen["plain"] == (HALF, FULL)  # it was not lowered: what arrives is lifted
    assert seen["down"] == (FULL, HALF)
    assert seen["norm"] == (FULL, FULL)  # the sum with an fp32 stream is fp32
    assert seen["lstm"] == (FULL, FULL)
    assert seen["head"] == (FULL, HALF)
    # Whoever calls the model sees no other types than before.
    assert {t.dtype for t in model(inputs()).values()} == {FULL}
    assert {g.dtype for g in train(model)} == {FULL}
    assert not torch.is_autocast_enabled("cpu")


def test_fp16_is_not_handed_on_and_neither_is_anything_outside_the_models_forward() -> None:
    model = set_precision(Mixed(), {"*.up": "fp16", "*.down": "bf16"})
    assert types_seen(model)["up"] == (FULL, FULL)
    assert model.body(inputs()).dtype == FULL
    alone = set_precision(nn.Linear(16, 8), {"*": "bf16"})
    assert alone(inputs()).dtype == FULL
    half = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4)).bfloat16()
    set_precision(half, {"0": "bf16"})
    assert half(inputs().bfloat16()).dtype == HALF


def test_autocast_and_the_models_own_types_decide_where_there_are_some() -> None:
    model = set_precision(
        Mixed().body, {"up": LOW}
    )  # without the recurrent layer: not every CPU has one in bf16
    with torch.autocast("cpu", torch.bfloat16):
        assert types_seen(model)["plain"] == (HALF, HALF)
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16


@pytest.mark.parametrize("names", [("*.up", "*.down"), ("body.*", "head"), ("?*",)])
def test_checkpointing_recomputes_the_same(names: tuple[str, ...]) -> None:
    model = set_precision(Mixed(), dict.fromkeys(names, LOW))
    exact = train(copy.deepcopy(model))
    model.checkpointed = True
    assert all(torch.equal(a, b) for a, b in zip(train(model), exact, strict=True))


def test_it_ends_with_the_forward_also_by_an_exception_and_is_restored() -> None:
    model = Mixed()
    exact = train(model)
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    set_precision(model, {"*.up": LOW, "*.down": LOW})
    model.fails = True
    with pytest.raises(RuntimeError, match="on purpose"):
        model(inputs())
    assert not torch.is_autocast_enabled("cpu")
    assert torch.get_autocast_dtype("cpu") == torch.bfloat16
    model.fails = False
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert types_seen(other)["gelu"] == (HALF, HALF)
    set_precision(model, {})
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert all(torch.equal(a, b) for a, b in zip(train(model), exact, strict=True))


def kept_bytes(model: nn.Module, batch: tuple[torch.Tensor, ...], autocast: bool) -> int:
    """What autograd holds after forward: every storage once, parameters and the batch not at all."""
    outside = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), *batch)}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in outside:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        with torch.autocast("cpu", HALF) if autocast else nullcontext():
            loss = model(*batch)
        total = sum(kept.values())
    loss.backward()
    return total


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("after", [{}, {"up": LOW}, {"up": "fp16"}])
def test_it_ends_with_the_forward_in_which_precisions_change(after: dict[str, str], first: bool) -> None:
    """As where a plan is switched in the model's forward pre-hook: the hooks that would end it are gone."""
    model = nn.Sequential()
    model.up, model.down = nn.Linear(16, 16), nn.Linear(16, 4)
    set_precision(model, {"?*": LOW})
    model.register_forward_pre_hook(lambda *_: set_precision(model, after) and None, prepend=first)
    for _ in range(2):
        assert model(torch.randn(3, 16)).dtype == FULL
        assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("name", ["gpt", "gpt2", "llama", "bert", "vit", "resnet", "conv"])
def test_less_is_kept_than_under_autocast_and_as_much_as_predicted(name: str) -> None:
    torch.manual_seed(0)
    model, batch = MODELS[name](), batch_for(name, 8)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # attention with dropout is computed in another way, in fp32
    workload = capture_workload(model, batch)
    attention = {n: "bf16" for n in workload.settings if n.endswith("/attention")}
    plain, cast = kept_bytes(model, batch, False), kept_bytes(model, batch, True)
    assert step_memory(workload).activations == pytest.approx(plain, rel=0.03)
    for low in dict.fromkeys(("bf16", LOW)):
        chosen = {n: "bf16" if n in attention or _is_table(model, n) else low for n in workload.settings}
        set_precision(model, chosen)
        kept = kept_bytes(model, batch, False)
        assert kept <= cast, (low, kept / cast)
        assert step_memory(workload, chosen).activations == pytest.approx(kept, rel=0.03)
        set_precision(model, chosen)
        assert kept_bytes(model, batch, True) <= cast
        set_precision(model, {})


@pytest.mark.parametrize("name", ["gpt", "gpt2", "llama", "bert", "vit", "resnet", "conv"])
def test_everything_lowered_keeps_no_more_than_autocast(name: str) -> None:
    """With one pattern: products of activations are lowered with the operators."""
    torch.manual_seed(0)
    model, batch = MODELS[name](), batch_for(name, 8)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    workload = capture_workload(model, batch)
    cast = kept_bytes(model, batch, True)
    for patterns in ({"*": "bf16"}, {"?*": LOW}):
        set_precision(model, patterns)
        kept = kept_bytes(model, batch, False)
        assert kept <= cast, (patterns, kept / cast)
        predicted = step_memory(workload, with_products(workload, patterns)).activations
        assert predicted == pytest.approx(kept, rel=0.03)


class Own(nn.Linear):
    """A linear layer that is no operator: it has a forward of its own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return F.linear(input, self.weight, self.bias)


class Attends(nn.Module):
    """Attention between layers, beside a product with a parameter that belongs to no operator."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into, self.out = nn.Linear(16, 16), nn.Linear(16, 16)
        self.own = Own(16, 16)
        self.heads = nn.MultiheadAttention(16, 2, batch_first=True)
        self.table = nn.Parameter(torch.randn(16, 16))
        self.attended: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.into(x)
        mixed = F.scaled_dot_product_attention(y, y, y) + y @ y.transpose(1, 2) @ y
        self.attended = [mixed.dtype, self.own(mixed).dtype, self.heads(mixed, mixed, mixed)[0].dtype]
        result: torch.Tensor = self.out(F.linear(mixed, self.table))
        return result


def test_products_of_activations_are_lowered_with_everything() -> None:
    model = Attends()
    set_precision(model, {"*": "bf16"})
    model(inputs())
    assert model.attended == [HALF, FULL, FULL]  # the others keep their precision, as is said of them
    for patterns in ({"into": "bf16", "out": "bf16"}, {"*": "fp16"}):
        set_precision(model, patterns)
        model(inputs())
        assert model.attended[0] == FULL
    inner = nn.Sequential(model)
    set_precision(inner, {"0/attention": "fp32", "*": "bf16"})
    inner(inputs())
    assert model.attended[0] == FULL
    set_precision(inner, {})
    model(inputs())
    assert model.attended == [FULL, FULL, FULL]


def test_weights_that_were_cast_are_cast_again_after_they_change() -> None:
    model = Attends()
    set_precision(model, {"*": "bf16"})
    before = model(inputs())
    with torch.no_grad():
        model.table.mul_(2)
    after = model(inputs())
    bias = model.out.bias
    assert torch.allclose(after - bias, 2 * (before - bias), rtol=0.05, atol=0.05)


def _is_table(model: nn.Module, name: str) -> bool:
    return not name.endswith("/attention") and isinstance(model.get_submodule(name), nn.Embedding)


def test_codes_are_made_again_where_the_input_is_kept_anyway() -> None:
    int8 = Precision.of("int8")
    x = torch.randn(4, 6, dtype=HALF, requires_grad=True)
    assert shares_input(F.relu(x), int8)
    assert shares_input(F.relu(x).view(2, 2, 6), int8)
    assert shares_input(F.relu(x).unsqueeze(1), int8)  # as a 1-D convolution sees it
    assert not shares_input(F.gelu(x), int8)
    assert not shares_input(F.relu(x).float(), int8)
    heads = x.view(1, 4, 2, 3).transpose(1, 2)
    mixed = F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2)
    assert shares_input(mixed, int8)
    assert not shares_input(mixed.contiguous().add(1), int8)
    assert not shares_input(F.relu(x), Precision.of("bf16"))
    if LOW != "int8":
        return
    gradients = []
    for activation in (nn.ReLU(), _Kept()):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), activation, nn.Linear(8, 3))
        set_precision(model, {"0": "bf16", "2": "int8"})
        model(torch.ones(5, 6)).square().mean().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


class _Kept(nn.Module):
    """A ReLU whose result is not kept."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.where(x > 0, x, torch.zeros_like(x))
