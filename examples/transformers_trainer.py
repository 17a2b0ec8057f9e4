"""The Trainer of Transformers on uneven ranks: a tiny language model on random text.

trimtab run --nproc-per-node 2 examples/transformers_trainer.py      # the callback may go
torchrun    --nproc-per-node 2 examples/transformers_trainer.py      # the callback does what `trimtab run` does
"""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import trimtab
from trimtab.frameworks.transformers import TrimtabCallback

steps = 16

torch.manual_seed(0)
text = torch.randint(0, 256, (512, 17))
dataset = [{"input_ids": row[:16], "labels": row[:16]} for row in text]
model = GPT2LMHeadModel(
    GPT2Config(
        vocab_size=256, bos_token_id=0, eos_token_id=0, n_positions=16, n_embd=256, n_layer=2, n_head=4
    )
)

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=8,
        average_tokens_across_devices=False,  # every rank's loss is its own mean, which trimtab weighs
        report_to="none",
        save_strategy="no",
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=dataset, callbacks=[TrimtabCallback()])
    trainer.train()

if trainer.is_world_process_zero():
    print(trimtab.explain(trainer.model_wrapped))
if dist.is_initialized():
    dist.barrier()
    dist.destroy_process_group()
