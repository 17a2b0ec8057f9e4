"""Some operators in lower precision, by name: on one process, no launcher needed.

python examples/precision.py
"""

from __future__ import annotations

import torch

import trimtab
from trimtab.models.data import Passages
from trimtab.models.gpt import Gpt

torch.manual_seed(0)
model = Gpt(width=32, layers=2, heads=2, context=32)
trimtab.set_precision(model, {"blocks.*.up": "bf16", "blocks.*.down": "bf16"})  # weights stay in fp32
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
text, losses = Passages(33), []
for step in range(10):
    loss = model(torch.stack([text[4 * step + sample] for sample in range(4)]))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
trimtab.set_precision(model, {})  # back to the model's own
