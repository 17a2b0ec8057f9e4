"""A GPT-2 of `transformers` in a Lightning module, on the standard library's source."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel

try:
    import lightning
    from lightning.pytorch.strategies import DDPStrategy
except ImportError:  # its other name
    import pytorch_lightning as lightning
    from pytorch_lightning.strategies import DDPStrategy

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--width", type=int, default=512)
parser.add_argument("--layers", type=int, default=7)
parser.add_argument("--length", type=int, default=64)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--device", default="cpu")
parser.add_argument("--record", type=Path, required=True)


class Text(Dataset[torch.Tensor]):
    """Passages of the standard library's source, as bytes."""

    def __init__(self, length: int) -> None:
        sources = sorted(Path(os.__file__).parent.glob("*.py"))[:80]
        text = torch.frombuffer(bytearray(b"".join(map(Path.read_bytes, sources))), dtype=torch.uint8)
        self.passages = text[: len(text) // length * length].view(-1, length).long()

    def __len__(self) -> int:
        return len(self.passages) - 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.passages[64 + index]


class Module(lightning.LightningModule):  # type: ignore[misc]  # untyped where it is not installed
    """The model, its loss and its optimizer."""

    def __init__(self, width: int, layers: int, length: int) -> None:
        super().__init__()
        config = GPT2Config(
            vocab_size=256, n_positions=length, n_embd=width, n_layer=layers, n_head=8,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        self.model = GPT2LMHeadModel(config)
        self.steps: list[dict[str, float]] = []

    def training_step(self, batch: torch.Tensor, _index: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(batch, labels=batch).loss
        return loss

    def on_train_batch_end(self, outputs: Any, _batch: Any, _index: int) -> None:
        self.steps.append({"time": time.time(), "loss": float(outputs["loss"])})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-4)


def main() -> None:
    args = parser.parse_args()
    lightning.seed_everything(args.seed, verbose=False)
    data = Text(args.length)
    module = Module(args.width, args.layers, args.length)
    cuda = args.device == "cuda"
    trainer = lightning.Trainer(
        accelerator="gpu" if cuda else "cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        strategy=DDPStrategy(process_group_backend="nccl" if cuda else "gloo"),
        precision="bf16-mixed" if cuda else "32-true",
        max_steps=args.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(data, batch_size=args.batch, shuffle=True, drop_last=True))
    module.eval()
    with torch.no_grad():
        passages = data.passages[:64].to(module.device)
        held_out = float(module.model(passages, labels=passages).loss)
    if trainer.is_global_zero:
        args.record.write_text(json.dumps({"steps": module.steps, "held_out": held_out}))


if __name__ == "__main__":
    main()
