"""Lightning and the Transformers Trainer on two unequal ranks: their batches are cut, and count as one device's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, torch, torch.nn.functional as F, warnings
warnings.filterwarnings("ignore")
import lightning, torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
torch.set_default_dtype(torch.float64)
torch.manual_seed(1)
STEPS, LR = 6, 0.01
data = TensorDataset(torch.randn(16 * STEPS, 8), torch.randint(0, 4, (16 * STEPS,)))
words, lengths = torch.randint(32, (16 * STEPS, 12)), torch.randint(3, 12, (16 * STEPS,))
labels = torch.where(torch.arange(12) < lengths[:, None], words, -100)

def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))

def gpt():
    torch.manual_seed(0)
    drop = dict(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=12, n_embd=16, n_layer=1, n_head=2, **drop))

def alone(model, loss_of):
    "One device on the global batches."
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    for step in range(STEPS):
        loss_of(model, slice(16 * step, 16 * step + 16)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model

def gap(one, two):
    return max((a - b).abs().max().item() for a, b in zip(one.parameters(), two.parameters(), strict=True))

def over_tokens(model, part):
    counted = (labels[part] != -100).sum()  # as the Trainer counts: with the first of each text, which is no target
    return model(words[part], labels=labels[part], num_items_in_batch=counted).loss

def over_samples(model, part):
    inputs, classes = data[order[part]]
    return F.cross_entropy(model(inputs), classes)

# Before anything is taken over. Lightning's own sampler shuffles.
order = list(DistributedSampler(data, num_replicas=1, rank=0, shuffle=True, seed=0))
reference = alone(net(), over_samples)
reference_gpt = alone(gpt(), over_tokens)

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.sizes = net(), []
    def training_step(self, batch, index):
        self.sizes.append(len(batch[0]))
        return F.cross_entropy(self.net(batch[0]), batch[1])
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=LR, weight_decay=0.0)

module = Module()
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", devices=2, strategy="ddp", **quiet)
trainer.fit(module, DataLoader(data, batch_size=8))
found = {"lightning": [module.sizes, gap(module.net, reference)]}

class Text(torch.utils.data.Dataset):
    def __len__(self):
        return len(words)
    def __getitem__(self, index):
        return {"input_ids": words[index], "labels": labels[index]}

class InOrder(Trainer):
    def _get_train_sampler(self, *_):
        return SequentialSampler(self.train_dataset)

for across in (True, False):
    model, sizes = gpt(), []
    model.register_forward_pre_hook(lambda _, args, kwargs: sizes.append(len(kwargs["input_ids"])), with_kwargs=True)
    arguments = TrainingArguments(
        output_dir="out", per_device_train_batch_size=8, num_train_epochs=1, use_cpu=True, report_to=[],
        save_strategy="no", logging_strategy="no", disable_tqdm=True, average_tokens_across_devices=across,
        learning_rate=LR, lr_scheduler_type="constant", max_grad_norm=0.0, optim="adamw_torch",
    )
    InOrder(model=model, args=arguments, train_dataset=Text()).train()
    found[f"trainer {across}"] = [sizes, gap(model, reference_gpt)]

with open(f"rank-{dist.get_rank()}.json", "w") as file:
    json.dump(found, file)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.timeout(300)
def test_batches_are_cut_and_weighed_in_lightning_and_in_the_trainer(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "trimtab.cli", "run", "--nproc-per-node", "2", "--batch-sizes", "11,5"]
    done = subprocess.run(
        [*command, "--adjust", "shares", str(script)],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for rank, own in enumerate((11, 5)):
        found = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        for name, equal in (("lightning", 3), ("trainer True", 4)):  # the Trainer draws a batch ahead
            sizes, gap = found[name]
            assert sizes == [8] * equal + [own] * (6 - equal), name
            assert gap < 1e-10, name
        assert found["trainer False"][0] == [8] * 6
    assert "batches stay equal on all ranks: average_tokens_across_devices=False" in done.stderr
