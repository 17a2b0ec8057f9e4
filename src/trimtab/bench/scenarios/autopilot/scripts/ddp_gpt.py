"""A GPT in plain DistributedDataParallel, on the standard library's source."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

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
        self.passages = text[: len(text) // (length + 1) * (length + 1)].view(-1, length + 1).long()

    def __len__(self) -> int:
        return len(self.passages) - 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.passages[64 + index]


class Gpt(nn.Module):
    """Returns logits; the loss is the script's."""

    def __init__(self, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(
            width, 8, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.tokens(text) + self.places.weight
        logits: torch.Tensor = self.head(self.blocks(x, mask=self.mask))
        return logits


def loss_of(model: nn.Module, text: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(text[:, :-1]).flatten(0, 1).float(), text[:, 1:].flatten())


def main() -> None:
    args = parser.parse_args()
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if args.device == "cuda" else "cpu")
    torch.manual_seed(args.seed)
    data = Text(args.length)
    model = DistributedDataParallel(Gpt(args.width, args.layers, args.length).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    sampler: DistributedSampler[torch.Tensor] = DistributedSampler(data, seed=args.seed)
    step, records = 0, []
    while step < args.steps:
        for batch in DataLoader(data, batch_size=args.batch, sampler=sampler, drop_last=True):
            with torch.autocast(args.device, torch.bfloat16, enabled=args.device == "cuda"):
                loss = loss_of(model, batch.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            records.append({"time": time.time(), "loss": loss.item()})
            if step == args.steps:
                break
    model.eval()
    with torch.no_grad():
        held_out = loss_of(model.module, data.passages[:64].to(device)).item()
    if dist.get_rank() == 0:
        args.record.write_text(json.dumps({"steps": records, "held_out": held_out}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
