"""Predicted and measured peak memory of one model, in a process of its own: `python -m tests.gpu.memory_cases gpt2`."""

from __future__ import annotations

import gc
import json
import sys
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from trimtab.api.set_precision import set_precision
from trimtab.measure.capture.capture import capture_workload
from trimtab.precision.devices import offers
from trimtab.precision.setting import precisions_of
from trimtab.precision_names import ATTENTION
from trimtab.predict.memory.step_peak import step_memory
from trimtab.predict.precision_patterns import with_products

CUDA = torch.device("cuda")
SETTINGS: dict[str, tuple[str | None, dict[str, str]]] = {
    # Name: autocast, and precisions by pattern.
    "fp32": (None, {}),
    "bf16 autocast": ("bf16", {}),
    "bf16 set": (None, {"*": "bf16"}),
    "bf16 set, attention in fp32": (None, {"*": "bf16", "*.attention/attention": "fp32"}),
    "int8 set": (None, {"?*": "int8"}),
    "int8 set, convolutions in bf16": (None, {"*classifier*": "int8", "?*": "bf16"}),
    "int8 set in bf16 autocast": ("bf16", {"?*": "int8"}),
    "fp8 set in bf16 autocast": ("bf16", {"?*": "fp8"}),
}
ONLY = {
    "bf16 set, attention in fp32": "vit",
    "int8 set, convolutions in bf16": "resnet",
}
"""Settings that not every model has operators for."""


class Loss(nn.Module):
    """A transformers model that gives its loss alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(inputs, labels=labels).loss
        return loss


def make(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    import transformers

    if name == "gpt2":
        config = transformers.GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        ids = torch.randint(50257, (8, 512), device=CUDA)
        return Loss(transformers.GPT2LMHeadModel(config)), (ids, ids)
    if name == "llama":
        sizes: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12}
        llama = transformers.LlamaConfig(**sizes, num_attention_heads=16, use_cache=False)
        ids = torch.randint(32000, (8, 512), device=CUDA)
        return Loss(transformers.LlamaForCausalLM(llama)), (ids, ids)
    if name == "bert":
        bert = transformers.BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        ids = torch.randint(30522, (32, 256), device=CUDA)
        return Loss(transformers.BertForSequenceClassification(bert)), (
            ids,
            torch.randint(2, (32,), device=CUDA),
        )
    model = (
        transformers.ViTForImageClassification(transformers.ViTConfig())
        if name == "vit"
        else transformers.ResNetForImageClassification(transformers.ResNetConfig())
    )
    return Loss(model), (torch.randn(64, 3, 224, 224, device=CUDA), torch.randint(2, (64,), device=CUDA))


def library_workspace() -> int:
    """What matrix products leave allocated: in this thread, and in the one that runs backward."""
    x = torch.randn(64, 64, device=CUDA, requires_grad=True)
    before = torch.cuda.memory_allocated()
    torch.autograd.grad((x @ x).sum(), x)
    torch.cuda.synchronize()
    gc.collect()
    return torch.cuda.memory_allocated() - before


def measure(
    model: nn.Module, batch: tuple[torch.Tensor, ...], autocast: str | None, fused: bool
) -> dict[str, int]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=fused)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16) if autocast else nullcontext():
            loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    return {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "at_rest": torch.cuda.memory_allocated(),
    }


def case(name: str, setting: str, fused: bool, workspace: int) -> dict[str, Any]:
    autocast, patterns = SETTINGS[setting]
    torch.manual_seed(0)
    gc.collect()
    torch.cuda.empty_cache()
    outside = torch.cuda.memory_allocated() - workspace
    model, batch = make(name)
    model = model.to(CUDA).train()
    workload = capture_workload(model, batch, autocast=autocast, device="cuda")
    set_precision(model, patterns)
    # A wildcard skips operators for which this device does not offer its precision.
    precisions = {
        name: str(precision) for name, precision in precisions_of(model).items() if name in workload.settings
    }
    precisions |= {
        name: value
        for name, value in (with_products(workload, patterns) if patterns else {}).items()
        if name.endswith(ATTENTION)
    }
    predicted = step_memory(
        workload,
        precisions,
        kind="cuda",
        optimizer="adam_fused" if fused else "adam",
        workspace=workspace,
    )
    measured = measure(model, batch, autocast, fused)
    allocated = measured["allocated"] - outside
    # Parameters, gradients and Adam's two averages, all in fp32.
    held = 4 * sum(parameter.nbytes for parameter in model.parameters())
    return {
        "setting": setting,
        "optimizer": "fused" if fused else "foreach",
        "predicted_mib": round(predicted.peak / 2**20, 1),
        "measured_mib": round(allocated / 2**20, 1),
        "activations_mib": round((allocated - held) / 2**20, 1),
        "error": round(predicted.peak / allocated - 1, 5),
        "peak": f"{predicted.phase} {predicted.operator}",
        "reserved_over_allocated": round(measured["reserved"] / measured["allocated"], 4),
    }


def cases(name: str) -> list[dict[str, Any]]:
    workspace = library_workspace()
    return [
        case(name, setting, fused, workspace)
        for setting, (_, patterns) in SETTINGS.items()
        if set(patterns.values()) <= set(offers(CUDA)["linear"]) and ONLY.get(setting, name) == name
        for fused in ((True, False) if setting == "fp32" else (True,))
    ]


if __name__ == "__main__":
    print(json.dumps(cases(sys.argv[1])))
