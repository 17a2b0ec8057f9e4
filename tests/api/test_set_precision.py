"""Setting the precision of a model: in place, exactly reversible, and under the wrappers people use."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.requirements import requires
from torch import nn
from torch.utils.checkpoint import checkpoint

from trimtab.api.set_precision import set_precision
from trimtab.errors import TrimtabError
from trimtab.precision.devices import offers
from trimtab.precision.setting import precisions_of
from trimtab.precision_names import Precision

if TYPE_CHECKING:
    from tests.support.pool import Pool

LOW = "int8" if "int8" in offers(torch.device("cpu"))["linear"] else "bf16"


class Net(nn.Module):
    """Two blocks and a head, for wrappers to wrap."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(2)
        )
        self.head = nn.Linear(16, 4)
        self.checkpointed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x))
        y: torch.Tensor = self.head(x)
        return y


def inputs() -> torch.Tensor:
    return torch.randn(12, 16, generator=torch.Generator().manual_seed(1))


def loss_and_gradients(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    loss = model(inputs()).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def close(found: list[torch.Tensor], exact: list[torch.Tensor], largest: float = 0.1) -> bool:
    errors = [float((a - b).norm() / b.norm().clamp_min(1e-6)) for a, b in zip(found, exact, strict=True)]
    return 0 < max(errors) < largest


def test_it_is_exactly_reversible_and_leaves_the_state_alone() -> None:
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attributes = {name: set(module.__dict__) for name, module in model.named_modules()}
    exact = loss_and_gradients(model)
    assert set_precision(model, {"?*": LOW}) is model
    assert close(loss_and_gradients(model), exact)
    now = model.state_dict()
    assert [(n, t.shape, t.dtype) for n, t in now.items()] == [
        (n, t.shape, t.dtype) for n, t in before.items()
    ]
    assert all(torch.equal(now[name], before[name]) for name in before)
    assert all(type(m) is nn.Linear for n, m in model.named_modules() if n in precisions_of(model))
    model.load_state_dict(before)
    set_precision(model, {})
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == attributes
    assert all(torch.equal(a, b) for a, b in zip(loss_and_gradients(model), exact, strict=True))


@pytest.mark.parametrize("pattern", ["*", "?*", ""])
def test_a_model_that_is_one_operator_has_no_name_and_is_matched_by_everything(pattern: str) -> None:
    model = set_precision(nn.Linear(512, 512), {pattern: LOW})
    assert list(precisions_of(model)) == [""]


def test_the_first_pattern_wins_and_a_second_call_replaces_the_first() -> None:
    model = Net()
    mixed = Precision(forward="bf16", grad_input="fp32", grad_weight="fp32")
    set_precision(model, {"blocks.0.0": mixed, "blocks.*": "bf16"})
    assert {n: str(p) for n, p in precisions_of(model).items()} == {
        "blocks.0.0": "bf16/fp32/fp32",
        "blocks.0.2": "bf16",
        "blocks.1.0": "bf16",
        "blocks.1.2": "bf16",
    }
    set_precision(model, {"head": "bf16"})
    assert list(precisions_of(model)) == ["head"]


@pytest.mark.parametrize(
    ("precisions", "message"),
    [
        ({"bloks.*": "bf16"}, r"'bloks.*' matches no operator .*its operators are blocks.0.0, blocks.0.2"),
        ({"*": "bf16", "head": "bf16"}, r"'head' matches no operator .* an earlier pattern"),
        ({"head": "int3"}, r"'head': there is no precision 'int3'; choose from fp32"),
        ({"blocks.1/attention": "int8"}, r"does not offer int8 .* it offers fp32, bf16, fp16"),
    ],
)
def test_mistakes_are_explained(precisions: dict[str, str], message: str) -> None:
    model = Net()
    set_precision(model, {"head": "bf16"})
    with pytest.raises(TrimtabError, match=message):
        set_precision(model, precisions)
    assert list(precisions_of(model)) == ["head"]


def test_a_wildcard_passes_over_what_no_device_could_give() -> None:
    model = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8), nn.MultiheadAttention(8, 2))
    if LOW == "int8":
        set_precision(model, {"?*": "int8"})
        assert list(precisions_of(model)) == ["1"]
        with pytest.raises(TrimtabError, match="does not offer int8 for forward of this embedding"):
            set_precision(model, {"0": "int8"})
    set_precision(model, {"*": "bf16"})
    # The projection inside is never called: its weights are read, so it is not an operator.
    assert list(precisions_of(model)) == ["0", "1"]


def test_a_forward_of_the_users_own_is_left_alone() -> None:
    class Own(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    model = nn.Sequential(Own(4, 4), nn.Linear(4, 4))
    model[1].forward = lambda x: x
    with pytest.raises(TrimtabError, match="0 is of class Own, whose class has a forward of its own"):
        set_precision(model, {"*": "bf16"})


def test_it_does_nothing_when_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIMTAB_DISABLE", "1")
    model = Net()
    set_precision(model, {"*": "bf16"})
    assert precisions_of(model) == {}


def test_copies_and_pickles_compute_alike() -> None:
    model = set_precision(Net(), {"?*": LOW})
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert precisions_of(other) == precisions_of(model)
        found = loss_and_gradients(other)
        assert all(
            torch.equal(a, b) for a, b in zip(found, loss_and_gradients(copy.deepcopy(model)), strict=True)
        )
        forward: Any = other.head.forward
        assert forward.module is other.head


def test_rounding_changes_with_every_call_and_repeats_with_the_seed() -> None:
    if LOW != "int8":
        pytest.skip("half types round to nearest")
    model = set_precision(Net(), {"?*": LOW}, seed=3)
    first, second = model(inputs()), model(inputs())
    assert not torch.equal(first, second)
    set_precision(model, {"?*": LOW}, seed=3)
    assert torch.equal(model(inputs()), first)
    set_precision(model, {"?*": LOW}, seed=4)
    assert not torch.equal(model(inputs()), first)


def test_checkpointing_recomputes_the_same_bits() -> None:
    model, other = set_precision(Net(), {"?*": LOW}), set_precision(Net(), {"?*": LOW})
    other.checkpointed = True
    for a, b in zip(loss_and_gradients(model), loss_and_gradients(other), strict=True):
        assert torch.equal(a, b)


def test_autocast_keeps_its_types() -> None:
    model, plain = set_precision(Net(), {"blocks.*": LOW}), Net()
    with torch.autocast("cpu", torch.bfloat16):
        y, wanted = model(inputs()), plain(inputs())
    assert y.dtype == wanted.dtype == torch.bfloat16
    y.float().square().mean().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


def test_compiled_it_is_one_graph_and_its_rounding_still_moves() -> None:
    model = set_precision(Net(), {"?*": LOW})
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    exact = loss_and_gradients(Net())
    found = []
    for _ in range(3):
        found.append(loss_and_gradients(compiled))
        assert close(found[-1], exact, 0.25)
    if LOW == "int8":
        assert not torch.equal(found[1][0], found[2][0])
    with pytest.raises(TrimtabError, match="set its precision first"):
        set_precision(compiled, {"?*": LOW})
    torch._dynamo.reset()


def test_what_is_not_traced_breaks_the_graph_and_runs() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
    set_precision(model, {"?*": LOW})
    x = torch.randn(2, 3, 6, 6)
    compiled: Any = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        eager = copy.deepcopy(model)(x)
        y = compiled(x)
        # Compiled operators hand on the type of their inputs, others bf16 where the device has it.
        torch.testing.assert_close(y.float(), eager.float(), rtol=2e-2, atol=5e-3)
        y.sum().backward()
    torch._dynamo.reset()


def test_importing_it_imports_no_compiler() -> None:
    code = "import sys, trimtab.api.set_precision as _; print({'torch._dynamo', 'triton'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "set()"


def test_under_ddp(ranks: Pool) -> None:
    results = ranks(2, _ddp)
    assert results[0]["gradients"] == results[1]["gradients"]
    assert results[0]["operators"] == ["blocks.0.0", "blocks.0.2", "blocks.1.0", "blocks.1.2"]
    # Ranks round differently: alike inputs give unlike outputs.
    assert (results[0]["output"] != results[1]["output"]) == (LOW == "int8")


def _ddp() -> dict[str, Any]:
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(Net())
    set_precision(model, {"blocks.*": LOW})
    y = model(inputs())
    y.square().mean().backward()
    return {
        "gradients": [p.grad.tolist() for p in model.parameters() if p.grad is not None],
        "operators": list(precisions_of(model)),
        "output": y.tolist(),
    }


@pytest.mark.parametrize("order", ["before", "after"])
def test_under_fsdp2(ranks: Pool, order: str) -> None:
    for error in ranks(2, _fsdp, order):
        assert 0 < error < 0.1


def _fsdp(order: str) -> float:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = Net()
    exact = loss_and_gradients(Net())[1:]
    mesh = init_device_mesh("cpu", (2,))
    if order == "before":
        set_precision(model, {"blocks.*": LOW})
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if order == "after":
        set_precision(model, {"blocks.*": LOW})
    assert len(precisions_of(model)) == 4
    model(inputs()).square().mean().backward()
    found = [p.grad.full_tensor() for p in model.parameters() if p.grad is not None]  # type: ignore[attr-defined]
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True))


def _gpt2() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config), {"input_ids": torch.randint(64, (2, 16))}


def _bert() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=64
    )
    return BertModel(config, add_pooling_layer=False), {"input_ids": torch.randint(64, (2, 16))}


def _vit() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=16,
        patch_size=4,
    )
    return ViTModel(config, add_pooling_layer=False), {"pixel_values": torch.randn(2, 3, 16, 16)}


def _resnet() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import ResNetConfig, ResNetModel

    config = ResNetConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic")
    return ResNetModel(config), {"pixel_values": torch.randn(2, 3, 32, 32)}


def _llama() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64
    )
    return LlamaForCausalLM(config), {"input_ids": torch.randint(64, (2, 16))}


@requires(modules=["transformers"])
@pytest.mark.parametrize(
    ("make", "kinds"),
    [
        (_gpt2, {"c_attn": 2, "c_fc": 2, "wte": 1, "lm_head": 1}),
        (_bert, {"query": 2, "dense": 6, "word_embeddings": 1}),
        (_vit, {"projection": 1}),
        (_resnet, {"convolution": 7}),
        (_llama, {"q_proj": 2, "down_proj": 2, "embed_tokens": 1}),
    ],
)
@pytest.mark.parametrize("name", [LOW, "bf16"])
def test_transformers_models_without_touching_their_code(make: Any, kinds: dict[str, int], name: str) -> None:
    torch.manual_seed(0)
    model, batch = make()
    model.eval()  # no dropout: the two runs are to be compared

    def run() -> list[torch.Tensor]:
        model.zero_grad()
        loss = model(**batch)[0].square().mean()
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    exact = run()
    attention = {"*attn*/attention": "bf16"} if make is _gpt2 else {}
    set_precision(model, {"?*": name, **attention})
    found = run()
    assert len(found) == len(exact)
    assert abs(float(found[0] / exact[0]) - 1) < 0.05
    total = [torch.cat([g.flatten().double() for g in grads[1:]]) for grads in (found, exact)]
    assert 0 < float(1 - F.cosine_similarity(total[0], total[1], dim=0)) < 0.02
    names = list(precisions_of(model))
    for part, count in kinds.items():
        if name == "bf16" or part not in ("wte", "word_embeddings", "embed_tokens"):
            assert sum(n.rpartition(".")[2] == part for n in names) == count, (part, names)
    set_precision(model, {})
    assert all(torch.equal(a, b) for a, b in zip(run(), exact, strict=True))


@requires(modules=["transformers"])
def test_tied_embeddings_stay_one_tensor_with_one_gradient() -> None:
    model, batch = _gpt2()
    tied: Any = model
    set_precision(model, {"lm_head": LOW, "transformer.wte": "bf16"})
    assert tied.lm_head.weight is tied.transformer.wte.weight
    model(**batch)[0].square().mean().backward()
    gradient = tied.lm_head.weight.grad
    assert gradient is not None
    assert gradient.dtype == torch.float32
    assert "lm_head.weight" in model.state_dict()


def test_attention_inside_torchs_own_module_is_refused_rather_than_left_as_it_is() -> None:
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    with pytest.raises(TrimtabError, match=r"self_attn is a torch\.nn\.MultiheadAttention"):
        set_precision(layer, {"self_attn/attention": "bf16"})


@pytest.mark.parametrize("precisions", ["int8", Precision.of("bf16"), None, ["int8"]])
def test_precisions_without_patterns_are_refused(precisions: Any) -> None:
    with pytest.raises(TrimtabError, match=r"got .*pass \{'\*': 'bf16'\}"):
        set_precision(Net(), precisions)


@pytest.mark.parametrize("value", [8, None, "int7"])
def test_an_unknown_precision_is_refused(value: Any) -> None:
    with pytest.raises(TrimtabError, match="there is no precision"):
        set_precision(Net(), {"*": value})
