"""A GPT-2 of `transformers` with its Trainer, on the standard library's source."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--width", type=int, default=512)
parser.add_argument("--layers", type=int, default=7)
parser.add_argument("--length", type=int, default=64)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--device", default="cpu")
parser.add_argument("--record", type=Path, required=True)


class Text(Dataset[dict[str, torch.Tensor]]):
    """Passages of the standard library's source, as bytes."""

    def __init__(self, length: int, first: int, last: int | None) -> None:
        sources = sorted(Path(os.__file__).parent.glob("*.py"))[:80]
        text = torch.frombuffer(bytearray(b"".join(map(Path.read_bytes, sources))), dtype=torch.uint8)
        self.passages = text[: len(text) // length * length].view(-1, length).long()[first:last]

    def __len__(self) -> int:
        return len(self.passages)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.passages[index], "labels": self.passages[index]}


class Times(TrainerCallback):
    """When each step ended, and its loss."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs is not None and "loss" in logs:
            self.steps.append({"time": time.time(), "loss": float(logs["loss"])})


def main() -> None:
    args = parser.parse_args()
    set_seed(args.seed)
    width = args.width
    config = GPT2Config(
        vocab_size=256, n_positions=args.length, n_embd=width, n_layer=args.layers, n_head=8,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    times = Times()
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            output_dir=folder, max_steps=args.steps, per_device_train_batch_size=args.batch, seed=args.seed,
            learning_rate=3e-4, lr_scheduler_type="constant", logging_steps=1, save_strategy="no", report_to=[],
            disable_tqdm=True, use_cpu=args.device == "cpu", bf16=args.device == "cuda", dataloader_drop_last=True,
        )  # fmt: skip
        trainer = Trainer(
            GPT2LMHeadModel(config),
            options,
            train_dataset=Text(args.length, 64, None),
            eval_dataset=Text(args.length, 0, 64),
            callbacks=[times],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        held_out = trainer.evaluate()["eval_loss"]
        if trainer.is_world_process_zero():
            args.record.write_text(json.dumps({"steps": times.steps, "held_out": held_out}))


if __name__ == "__main__":
    main()
