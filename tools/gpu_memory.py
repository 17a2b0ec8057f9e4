"""Predicted against measured peak memory on the GPU at hand: models, precisions, optimisers.

PYTHONPATH=src python3 tools/gpu_memory.py --json memory.json
"""

from __future__ import annotations

import argparse
import gc
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trimtab.api.set_precision import set_precision
from trimtab.bench.result import Result
from trimtab.measure.capture.capture import capture_workload
from trimtab.precision.devices import offers
from trimtab.predict.memory.step_peak import step_memory
from trimtab.predict.precision_patterns import matched

if TYPE_CHECKING:
    from collections.abc import Callable

CUDA = torch.device("cuda")
STEPS = 3


class Loss(nn.Module):
    """A transformers model that gives its loss alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(inputs, labels=labels).loss
        return loss


def gpt2() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    model: nn.Module = GPT2LMHeadModel(GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    ids = torch.randint(50257, (8, 512), device=CUDA)
    return Loss(model), (ids, ids)


def vit() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    from transformers import ViTConfig, ViTForImageClassification

    model: nn.Module = ViTForImageClassification(ViTConfig())
    return Loss(model), (torch.randn(64, 3, 224, 224, device=CUDA), torch.randint(2, (64,), device=CUDA))


def resnet() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    from transformers import ResNetConfig, ResNetForImageClassification

    model: nn.Module = ResNetForImageClassification(ResNetConfig())
    return Loss(model), (torch.randn(64, 3, 224, 224, device=CUDA), torch.randint(2, (64,), device=CUDA))


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]]] = {
    "gpt2": gpt2,
    "vit": vit,
    "resnet": resnet,
}
SETTINGS: dict[str, tuple[str | None, dict[str, str]]] = {
    # Name: autocast, and precisions by pattern.
    "fp32": (None, {}),
    "bf16 autocast": ("bf16", {}),
    "bf16 set": (None, {"*": "bf16"}),
    "int8 set": (None, {"*": "int8"}),
    "int8 set in bf16 autocast": ("bf16", {"*": "int8"}),
    "fp8 set in bf16 autocast": ("bf16", {"*": "fp8"}),
}


def library_workspace() -> int:
    """What matrix products leave allocated: in this thread, and in the one that runs backward."""
    x = torch.randn(64, 64, device=CUDA, requires_grad=True)
    before = torch.cuda.memory_allocated()
    torch.autograd.grad((x @ x).sum(), x)
    torch.cuda.synchronize()
    gc.collect()
    return torch.cuda.memory_allocated() - before


def measured(
    model: nn.Module, batch: tuple[torch.Tensor, ...], autocast: str | None, fused: bool
) -> dict[str, int]:
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=fused)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16) if autocast else nullcontext():
            loss = model(*batch)
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()

    for _ in range(2):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    return {
        "allocated": torch.cuda.max_memory_allocated(),
        "requested": stats["requested_bytes.all.peak"],
        "reserved": torch.cuda.max_memory_reserved(),
        "at_rest": torch.cuda.memory_allocated(),
    }


def case(name: str, setting: str, fused: bool, workspace: int) -> dict[str, Any]:
    autocast, patterns = SETTINGS[setting]
    torch.manual_seed(0)
    gc.collect()
    torch.cuda.empty_cache()
    outside = torch.cuda.memory_allocated() - workspace
    model, batch = MODELS[name]()
    model = model.to(CUDA).train()
    workload = capture_workload(model, batch, autocast=autocast, device="cuda")
    precisions = matched(workload, patterns) if patterns else {}
    set_precision(model, patterns)
    predicted = step_memory(
        workload,
        precisions,
        kind="cuda",
        optimiser="adam_fused" if fused else "adam",
        workspace=workspace,
    )
    found = measured(model, batch, autocast, fused)
    allocated = found["allocated"] - outside
    rest = predicted.parameters + predicted.buffers + predicted.optimiser + workspace
    return {
        "model": name,
        "setting": setting,
        "optimiser": "fused" if fused else "foreach",
        "predicted_mib": predicted.peak / 2**20,
        "measured_mib": allocated / 2**20,
        "error": predicted.peak / allocated - 1,
        "peak": f"{predicted.phase} {predicted.operator}",
        "requested_mib": (found["requested"] - outside) / 2**20,
        "reserved_over_allocated": found["reserved"] / found["allocated"],
        "at_rest_error_mib": (rest - (found["at_rest"] - outside)) / 2**20,
        "activations_mib": predicted.activations / 2**20,
        "kernels": sorted({o.target for o in workload.operators if o.kind in ("other", "attention", "conv")}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    options = parser.parse_args()
    workspace = library_workspace()
    print(f"library workspace {workspace / 2**20:.1f} MiB on {torch.cuda.get_device_name()}")
    rows: list[dict[str, Any]] = []
    for name in options.models:
        for setting in SETTINGS:
            names = set(SETTINGS[setting][1].values())
            if not names <= set(offers(CUDA)["linear"]):
                continue
            for fused in (True, False) if setting == "fp32" else (True,):
                try:
                    row = case(name, setting, fused, workspace)
                    print(
                        f"{name:7} {setting:26} {row['optimiser']:8} predicted {row['predicted_mib']:9.1f} MiB  "
                        f"measured {row['measured_mib']:9.1f}  error {row['error']:+7.1%}  at rest "
                        f"{row['at_rest_error_mib']:+7.1f}  reserved/allocated {row['reserved_over_allocated']:.3f}  "
                        f"[{row['peak']}]",
                        flush=True,
                    )
                except Exception as error:
                    traceback.print_exc()
                    row = {"model": name, "setting": setting, "failed": repr(error)[:500]}
                rows.append(row)
                gc.collect()
                torch.cuda.empty_cache()
    errors = [abs(row["error"]) for row in rows if "error" in row]
    if errors:
        print(f"mean error {sum(errors) / len(errors):.1%}, worst {max(errors):.1%}")
    if options.json:
        summary: dict[str, float | bool | str] = {
            "cases": len(errors),
            "mean_error": sum(errors) / len(errors),
            "max_error": max(errors),
            "workspace_bytes": workspace,
        }
        options.json.write_text(Result(bench="memory on a GPU", summary=summary, rows=rows).to_json() + "\n")


if __name__ == "__main__":
    main()
