"""`trimtab run --batch-sizes`: the batches of an unchanged script are cut among the ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trimtab.cli.run import torchrun_command
from trimtab.errors import TrimtabError
from trimtab.report.run_folder import latest_run, load_run

SCRIPT = """
import json, torch, torch.distributed as dist, torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
generator = torch.Generator().manual_seed(1)
data = TensorDataset(
    torch.randn(130, 8, generator=generator, dtype=torch.float64), torch.randint(0, 4, (130,), generator=generator)
)

def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4)).double()

def train(model, batches):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sizes = []
    for inputs, targets in batches:
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        sizes.append(len(inputs))
    return sizes

def epochs():
    for epoch in range(2):
        sampler.set_epoch(epoch)
        yield from loader

sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
ddp = DistributedDataParallel(net())
sizes = train(ddp, epochs())
every = [None] * 2
dist.all_gather_object(every, sizes)

def whole_batches():
    for epoch in range(2):
        parts = [DistributedSampler(data, rank=rank) for rank in range(2)]
        for part in parts:
            part.set_epoch(epoch)
        for start in range(0, len(parts[0]), 8):
            yield data[[index for part in parts for index in list(part)[start : start + 8]]]

if dist.get_rank() == 0:
    alone = net()
    train(alone, whole_batches())
    gap = max((a - b).abs().max().item() for a, b in zip(alone.parameters(), ddp.module.parameters()))
    print(json.dumps({"sizes": every, "gap": gap}))
dist.barrier()
dist.destroy_process_group()
"""


def run(script: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trimtab.cli", "run", "--nproc-per-node", "2", *arguments, str(script)]
    return subprocess.run(
        command,
        cwd=script.parent,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


def test_an_unchanged_script_trains_as_one_device_on_its_global_batches(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = run(script, "--batch-sizes", "11,5")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["gap"] < 1e-10
    for sizes, size in zip(result["sizes"], (11, 5), strict=True):
        assert sizes == [8] * 3 + [size] * 5 + [1] + [size] * 8 + [1]
    assert "batches of 11/5 samples" in done.stderr


def test_a_script_that_needs_equal_batches_fails_with_a_hint(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    fixed = "(model(inputs) * torch.ones(8, 1)).mean()"
    script.write_text(SCRIPT.replace("F.cross_entropy(model(inputs), targets)", fixed))
    done = run(script, "--batch-sizes", "11,5")
    assert done.returncode == 1
    assert "must match the size of tensor b (8)" in done.stderr
    assert "batches were uneven at that time, of 11/5 samples" in done.stderr
    assert "if the script needs 8 in every batch, use --batch-sizes equal" in done.stderr


def test_batches_of_nested_tensors_end_no_job(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    lists = "torch.nested.nested_tensor([row[None].expand(1 + int(n), 8) for row, n in zip(inputs, targets)])"
    padded = f"torch.nested.to_padded_tensor(model({lists}), 0.0).sum(1)"
    layer = "torch.nn.Linear(8, 4).double()"
    changed = SCRIPT.replace("model(inputs)", padded).replace("DistributedDataParallel(net())", "wrapped")
    changed = changed.replace("ddp = wrapped", f"ddp = DistributedDataParallel({layer})")
    script.write_text(changed.split("every = ")[0] + "print(sizes)\ndist.destroy_process_group()\n")
    done = run(script, "--batch-sizes", "11,5")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("8, 8, 8, ") >= 1


def test_a_script_that_fails_early_has_its_own_error_only(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise ValueError('no data here')\n")
    done = run(script, "--batch-sizes", "11,5")
    assert done.returncode == 1
    assert "no data here" in done.stderr
    assert "were not used" not in done.stderr


def test_mistakes_are_refused_before_a_process_starts(tmp_path: Path) -> None:
    script = str(tmp_path / "train.py")
    Path(script).touch()
    for sizes, others, words in (
        ("24,11,11", [], "3 sizes for 2 ranks"),
        ("24;11", [], "as in 24,11,11"),
        ("24,0", [], "above 0"),
        ("fast", [], "auto, equal"),
        ("24,11,11", ["--local-steps", "4"], "3 sizes for 2 ranks"),
        ("24,11", ["--adjust", "bits"], "leaves them alone"),
    ):
        with pytest.raises(TrimtabError, match=words):
            torchrun_command(["--nproc-per-node", "2", "--batch-sizes", sizes, *others, script])
    command = torchrun_command(["--nproc-per-node", "2", "--batch-sizes=24,11", script])
    assert "--batch-sizes=24,11" not in command
    assert '{"batch_sizes": "24,11"}' in command


DATA = """
import json, sys, torch, torch.nn.functional as F, warnings
from torch.utils.data import DataLoader, TensorDataset
warnings.filterwarnings("ignore")
generator = torch.Generator().manual_seed(1)
data = TensorDataset(
    torch.randn(130, 8, generator=generator, dtype=torch.float64), torch.randint(0, 4, (130,), generator=generator)
)
def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4)).double()
def report(rank, sizes, model):
    with open(f"rank-{rank}.json", "w") as file:  # lines of this length would mix on one pipe
        json.dump([rank, sizes, [p.flatten().tolist() for p in model.parameters()]], file)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
"""

ACCELERATE = """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
model = net()
model, optimizer, loader = accelerator.prepare(
    model, torch.optim.AdamW(model.parameters(), lr=0.01), DataLoader(data, batch_size=8, shuffle=True)
)
sizes = []
for epoch in range(2):
    for inputs, targets in accelerator.skip_first_batches(loader, 2) if epoch == 0 else loader:
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
        sizes.append(len(inputs))
report(accelerator.process_index, sizes, model)
"""

LIGHTNING = """
import lightning
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.sizes = net(), []
    def training_step(self, batch, index):
        self.sizes.append(len(batch[0]))
        return F.cross_entropy(self.net(batch[0]), batch[1])
    def validation_step(self, batch, index):
        assert len(batch[0]) in (8, 1)
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)
module = Module()
trainer = lightning.Trainer(
    max_epochs=2, accelerator="cpu", devices=2, strategy="ddp", logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, accumulate_grad_batches=2, val_check_interval=4,
)
trainer.fit(module, DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=8))
report(trainer.global_rank, module.sizes, module)
"""

TRAINER = """
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
torch.set_default_dtype(torch.float64)
words, lengths = torch.randint(32, (130, 12), generator=generator), torch.randint(3, 12, (130,), generator=generator)
class Text(torch.utils.data.Dataset):
    def __len__(self):
        return len(words)
    def __getitem__(self, index):
        labels = words[index].clone()
        labels[lengths[index]:] = -100
        return {"input_ids": words[index], "labels": labels}
dropout = dict(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
config = GPT2Config(vocab_size=32, n_positions=12, n_embd=16, n_layer=1, n_head=2, **dropout)
torch.manual_seed(0)
model, sizes = GPT2LMHeadModel(config), []
model.register_forward_pre_hook(lambda _, args, kwargs: sizes.append(len(kwargs["input_ids"])), with_kwargs=True)
arguments = TrainingArguments(
    output_dir="out", per_device_train_batch_size=8, num_train_epochs=2, use_cpu=True, report_to=[], save_strategy="no",
    gradient_accumulation_steps=2, logging_strategy="no", disable_tqdm=True, average_tokens_across_devices=ACROSS,
)
Trainer(model=model, args=arguments, train_dataset=Text()).train()
report(arguments.process_index, sizes, model)
"""


def results(done: subprocess.CompletedProcess[str], folder: Path) -> list[Any]:
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("source", "uneven"),
    [
        pytest.param(ACCELERATE, True, id="accelerate"),
        pytest.param(LIGHTNING, True, id="lightning"),
        pytest.param(TRAINER.replace("ACROSS", "True"), True, id="trainer"),
        pytest.param(TRAINER.replace("ACROSS", "False"), False, id="trainer, tokens of each rank"),
    ],
)
def test_frameworks(tmp_path: Path, source: str, uneven: bool) -> None:
    """Loaders that a framework divides among the ranks: the same parameters as under torchrun."""
    script = tmp_path / "train.py"
    script.write_text(DATA + source)
    plain = results(run(script, TRIMTAB_DISABLE="1"), tmp_path)
    done = run(script, "--batch-sizes", "11,5")
    own = results(done, tmp_path)
    for (_, sizes, parameters), (_, _, expected), size in zip(own, plain, (11, 5), strict=True):
        assert (sizes.count(size) > len(sizes) // 3) == uneven, sizes
        for values, others in zip(parameters, expected, strict=True):
            assert max(abs(a - b) for a, b in zip(values, others, strict=True)) < 1e-10
    if source is not ACCELERATE:
        total = load_run(latest_run(tmp_path)).events("progress")[-1]["total_steps"]
        assert total == 10, "as the framework's Trainer knows it"
    if not uneven:
        assert "average_tokens_across_devices=False" in done.stderr
