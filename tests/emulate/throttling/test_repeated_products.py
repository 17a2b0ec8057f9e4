from __future__ import annotations

import sys
from subprocess import run
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

# In a process of its own: the kernels of this one stay as they are.
_CHECK = """
import sys, torch
from pathlib import Path
from trimtab.emulate.throttling.repeated_products import RepeatedProducts
from trimtab.emulate.throttling.rank_state import RankState

def results():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(2, 4, 3), torch.nn.Flatten(1), torch.nn.Linear(144, 32))
    x = torch.randn(3, 2, 8, 8, requires_grad=True)
    y = net(x).view(1, 2, 12, 4)
    out = torch.nn.functional.scaled_dot_product_attention(y, y, y) @ torch.randn(4, 4)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in net.parameters())]

plain = results()
state = RankState.create(Path(sys.argv[1]), 0.4)
repeated = RepeatedProducts(state, "cpu")
assert all(torch.equal(a, b) for a, b in zip(plain, results(), strict=True)), "results differ"

counts = []
extra = repeated._extra
repeated._extra = lambda: counts.append(extra()) or counts[-1]
torch.randn(4, 4) @ torch.randn(4, 4)
assert len(counts) == 1, "a product repeats once"
counts.clear()
for _ in range(10):
    torch.randn(4, 4) @ torch.randn(4, 4)
assert sum(counts) == 15, counts  # ten products at 0.4 are twenty-five
state.speed = 1.0
counts.clear()
torch.randn(4, 4) @ torch.randn(4, 4)
assert counts == [0], counts
"""


def test_products_repeat_and_results_stay(tmp_path: Path) -> None:
    done = run(
        [sys.executable, "-W", "error", "-c", _CHECK, str(tmp_path / "state")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
