"""Lightning's Trainer on uneven ranks: `strategy="trimtab"`.

python examples/lightning_trainer.py                                 # Lightning starts the second rank itself
trimtab run --nproc-per-node 2 examples/lightning_trainer.py         # here strategy="ddp" would do as well
"""

from __future__ import annotations

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import trimtab
import trimtab.frameworks.lightning  # registers strategy="trimtab"


class Classifier(L.LightningModule):  # type: ignore[misc]  # Lightning is typed only in part
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
        )

    def training_step(self, batch: list[Tensor], _index: int) -> Tensor:
        inputs, targets = batch
        return F.cross_entropy(self.layers(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def on_train_end(self) -> None:
        if self.trainer.is_global_zero:
            print(trimtab.explain(self.trainer.strategy.model))


L.seed_everything(0, verbose=False)
dataset = TensorDataset(torch.randn(512, 256), torch.randint(0, 10, (512,)))
trainer = L.Trainer(
    strategy="trimtab",
    devices=2,
    accelerator="auto" if torch.cuda.device_count() > 1 else "cpu",
    max_epochs=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Classifier(), DataLoader(dataset, batch_size=16, shuffle=True))
trainer.strategy.barrier()
