"""Ray Train's TorchTrainer on uneven workers: a trimtab backend config.

python examples/ray_train.py                    # starts a local Ray cluster, or joins the one of RAY_ADDRESS
"""

from __future__ import annotations

import tempfile

import ray.train
import torch
import torch.nn.functional as F
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trimtab.frameworks.ray import TrimtabConfig


def train(config: dict[str, float]) -> None:
    """What every worker runs: nothing in it is trimtab's but the last two lines."""
    import trimtab

    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(512, 256), torch.randint(0, 10, (512,)))
    layers = nn.Sequential(
        nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )
    loader = ray.train.torch.prepare_data_loader(DataLoader(dataset, batch_size=16, shuffle=True))
    model = ray.train.torch.prepare_model(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    loss = torch.zeros(())
    for inputs, targets in loader:
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if ray.train.get_context().get_world_rank() == 0:
        print(trimtab.explain(model))
        print("loss", loss.item())
    ray.train.report({"loss": loss.item()})


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        trainer = TorchTrainer(
            train,
            train_loop_config={"lr": 1e-3},
            torch_config=TrimtabConfig(),
            scaling_config=ScalingConfig(num_workers=2, use_gpu=torch.cuda.device_count() > 1),
            run_config=RunConfig(storage_path=folder),
        )
        trainer.fit()
