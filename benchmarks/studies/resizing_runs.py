"""The runs of the study of resizing: what each leaves out, step by step."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import cos, pi

import numpy as np
import torch
import torch.nn.functional as F
from benchmarks.studies.stacked_vit import AdamW, Block, Size, StackedVits
from numpy.typing import NDArray
from torch import Tensor

from trimtab.planning.tensor.resizing import RETURN, Pool, choose, even_counts, pooled_counts

RANKS, WINDOW, SLOW = 8, 8, 3
LR, DECAY, WARM_UP = 3e-3, 0.1, 50
BEGINS = 2 * WINDOW


@dataclass(frozen=True, kw_only=True)
class Method:
    """How a run leaves units out."""

    score: str = "random"
    """change, gradient, both, activation, most changed, or random."""

    impute: str = "zero"
    form: str = "unit"
    per_layer: bool = False
    draw: int = 0
    """Another number, other random choices."""

    canary: bool = False
    off: bool = False
    order: int = 0
    """Another number, another order of the images."""


@dataclass(frozen=True, kw_only=True)
class Run:
    method: Method
    seed: int


@dataclass(eq=False)
class Axis:
    """What can be left out along one axis of a block: units, entries of the input, or hidden entries."""

    name: str
    each: int
    """Slices of one rank."""

    runs: int
    known: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    """Scores (runs, ranks, each) by kind; NaN while unknown."""

    def __post_init__(self) -> None:
        self.left = np.zeros((self.runs, RANKS, self.each), dtype=np.bool_)
        self.waited = np.zeros((self.runs, RANKS, self.each), dtype=np.int64)

    def learn(self, kind: str, values: Tensor, frozen: NDArray[np.bool_]) -> None:
        """Record this window's scores, relative to their rank's mean; what was frozen keeps its earlier ones."""
        now = values.double().cpu().numpy().reshape(self.runs, RANKS, self.each)
        now = np.where(frozen, np.nan, now)
        now = now / np.nanmean(np.where(now == 0, np.nan, now), axis=2, keepdims=True)
        before = self.known.get(kind, np.full_like(now, np.nan))
        self.known[kind] = np.where(np.isnan(now), before, now)

    def scores(self, run: int, rank: int, kind: str) -> NDArray[np.float64]:
        scores: NDArray[np.float64]
        if kind == "both":
            scores = self.known["change"][run, rank] * self.known["gradient"][run, rank]
        elif kind == "most changed":
            scores = -self.known["change"][run, rank]
        else:
            scores = self.known[kind][run, rank]
        return scores


class Study:
    """All runs of one setting, trained together."""

    def __init__(
        self, size: Size, runs: Sequence[Run], gamma: float, moving: bool, device: torch.device
    ) -> None:
        self.size, self.runs, self.gamma, self.moving, self.device = size, runs, gamma, moving, device
        self.vits = StackedVits(size, [run.seed for run in runs], device)
        self.optimizer = AdamW(self.vits.parameters, decay=DECAY)
        self.last = {id(t): torch.zeros_like(t) for block in self.vits.blocks for t in block.tensors}
        self.frozen: dict[int, Tensor] = {}
        # On the device, so that no step waits for it.
        self.imputing = {
            kind: torch.tensor([i for i, run in enumerate(runs) if run.method.impute == kind], device=device)
            for kind in {run.method.impute for run in runs} - {"zero"}
        }
        self.axes = {
            (block.name, name): Axis(name, each, len(runs))
            for block in self.vits.blocks
            for name, each in (
                ("units", block.units // RANKS),
                ("ins", size.width),
                ("outs", block.units * block.width // RANKS),
            )
        }
        self._forget()

    def train(self, data: tuple[Tensor, Tensor], report: Callable[[int, int], None]) -> None:
        pixels, labels = (part.to(self.device) for part in data)
        total = self.size.epochs * self.size.steps_per_epoch
        orders: dict[tuple[int, int], Tensor] = {}
        for step in range(total):
            epoch, within = divmod(step, self.size.steps_per_epoch)
            if within == 0:
                orders = {
                    key: _order(len(labels), epoch, *key)
                    for key in {(r.seed, r.method.order) for r in self.runs}
                }
                report(epoch, self.size.epochs)
            chosen = torch.stack(
                [
                    orders[run.seed, run.method.order][within * self.size.batch :][: self.size.batch]
                    for run in self.runs
                ]
            ).to(self.device)
            if step % WINDOW == 0 and step > 0:
                self._learn()
                if step >= BEGINS:
                    self._choose(step, (SLOW + epoch) % RANKS if self.moving else SLOW)
                self._forget()
            for block in self.vits.blocks:
                block.watched = step % WINDOW == 0
            logits = self.vits.logits(pixels[chosen])
            # The sum over runs: their gradients do not meet.
            loss = F.cross_entropy(logits.flatten(0, 1), labels[chosen].flatten()) * len(self.runs)
            loss.backward()
            self._impute()
            self._watch()
            rate = min(1.0, (step + 1) / WARM_UP) * 0.5 * (1 + cos(pi * step / total))
            self.optimizer.step(LR * rate, self.frozen)

    @torch.no_grad()
    def test(self, data: tuple[Tensor, Tensor]) -> tuple[list[float], list[float]]:
        """Accuracy and loss of each run, with everything computed."""
        for block in self.vits.blocks:
            block.hidden_mask = block.in_mask = None
            block.watched = False
        right, losses = [], []
        for pixels, labels in zip(data[0].split(250), data[1].split(250), strict=True):
            shown = pixels.to(self.device).expand(len(self.runs), -1, -1, -1)
            logits = self.vits.logits(shown)
            wanted = labels.to(self.device).expand(len(self.runs), -1)
            right.append((logits.argmax(-1) == wanted).double().mean(1))
            losses.append(
                F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none")
                .view(logits.shape[:2])
                .double()
                .mean(1)
            )
        return torch.stack(right).mean(0).tolist(), torch.stack(losses).mean(0).tolist()

    def _forget(self) -> None:
        """A new window begins."""
        self.before = {id(t): t.detach().clone() for block in self.vits.blocks for t in block.tensors}
        self.gradients: dict[str, Tensor] = {}

    @torch.no_grad()
    def _watch(self) -> None:
        """Add this step's gradients to the scores of units."""
        for block in self.vits.blocks:
            sums = torch.zeros((), device=self.device)
            for tensor in block.tensors:
                assert tensor.grad is not None
                sums = sums + _by_unit(tensor.grad.abs(), block).sum(2)
            self.gradients[block.name] = self.gradients.get(block.name, 0) + sums

    @torch.no_grad()
    def _learn(self) -> None:
        unfrozen = np.array([run.method.impute != "zero" for run in self.runs])[:, None, None]
        for block in self.vits.blocks:
            changes = {id(t): (t - self.before[id(t)]).abs() for t in block.tensors}
            units = self.axes[block.name, "units"]
            frozen = units.left & ~unfrozen
            total = sum(
                (_by_unit(c, block).sum(2) for c in changes.values()),
                start=torch.zeros((), device=self.device),
            )
            units.learn("change", total, frozen)
            # Gradients that were filled in say nothing new about a unit.
            units.learn("gradient", self.gradients[block.name], units.left)
            assert block.norms is not None
            contributed = block.norms[..., None] * block.out.norm(dim=2, keepdim=True)
            units.learn("activation", _by_unit(contributed, block).sum(2), units.left)
            rows = [changes[id(w)].view(len(self.runs), RANKS, -1, self.size.width).sum(2) for w in block.ins]
            ins, outs = self.axes[block.name, "ins"], self.axes[block.name, "outs"]
            ins.learn("change", torch.stack(rows).sum(0), ins.left)
            outs.learn("change", changes[id(block.out)].sum(2), outs.left)

    def _choose(self, step: int, slow: int) -> None:
        """Choose what is left out in the next window, as the product does."""
        for axis in self.axes.values():
            axis.left[:] = False
        for index, run in enumerate(self.runs):
            method = run.method
            if method.off:
                continue
            for rank in range(RANKS) if method.canary else (slow,):
                for name in ("units",) if method.form == "unit" else ("ins", "outs"):
                    self._choose_for(index, run, rank, name, step)
        for axis in self.axes.values():
            axis.waited = np.where(axis.left, axis.waited + 1, 0)
        self._mask()

    def _choose_for(self, index: int, run: Run, rank: int, name: str, step: int) -> None:
        method = run.method
        pools = {}
        for block in self.vits.blocks:
            axis = self.axes[block.name, name]
            key = (run.seed, method.draw, step, rank, zlib.crc32(f"{block.name}.{name}".encode()))
            scores = (
                np.random.default_rng(key).random(axis.each)
                if method.score == "random"
                else axis.scores(index, rank, method.score)
            )
            cost = {"units": len(block.tensors) * block.width, "ins": len(block.ins), "outs": 1}[name]
            pools[block.name] = Pool(scores=scores, waited=axis.waited[index, rank], cost=cost)
        count = pooled_counts if method.per_layer else even_counts
        counts = count(pools, 0.9 if method.canary else self.gamma)
        for block_name, pool in pools.items():
            self.axes[block_name, name].left[index, rank] = choose(pool, counts[block_name], RETURN)

    def _mask(self) -> None:
        runs = len(self.runs)
        self.frozen = {}
        zero = torch.tensor([run.method.impute == "zero" for run in self.runs], device=self.device)
        column = torch.tensor([run.method.form == "column" for run in self.runs], device=self.device)
        self.left_units: dict[str, Tensor] = {}
        for block in self.vits.blocks:
            units, ins, outs = (
                torch.as_tensor(self.axes[block.name, name].left, device=self.device)
                for name in ("units", "ins", "outs")
            )
            entries = units.flatten(1).repeat_interleave(block.width, 1)
            self.left_units[block.name] = entries
            hidden = entries | outs.flatten(1)
            block.hidden_mask = (~hidden).float()
            each = block.units * block.width // RANKS
            cut = ins[:, :, None].expand(-1, -1, each, -1).reshape(runs, -1, self.size.width)
            block.in_mask = (~cut).float() if bool(column.any()) else None
            held = zero[:, None] & entries
            for weight in block.ins:
                self.frozen[id(weight)] = held[..., None] | cut
            for bias in block.biases:
                self.frozen[id(bias)] = held
            self.frozen[id(block.out)] = (zero[:, None] & hidden)[..., None].expand_as(block.out)

    @torch.no_grad()
    def _impute(self) -> None:
        """Fill in the gradients of units left out, where a run does."""
        if not self.frozen:
            return
        for kind, which in self.imputing.items():
            for block in self.vits.blocks:
                left = self.left_units[block.name][which]
                slow = left.view(len(which), RANKS, -1).any(2)
                for t in block.tensors:
                    assert t.grad is not None
                    gradient = t.grad[which].view(len(which), left.shape[1], -1)
                    if kind == "average":
                        by_rank = gradient.view(len(which), RANKS, -1, gradient.shape[2])
                        kept = (~left).view(len(which), RANKS, -1, 1)
                        filling = (by_rank * kept).sum(2) / kept.sum(2).clamp_min(1)
                        filling = (filling * slow[..., None]).repeat_interleave(by_rank.shape[2], 1)
                    else:
                        filling = self.last[id(t)][which].view_as(gradient)
                    full = torch.where(left[..., None], filling, gradient)
                    t.grad[which] = full.view_as(t.grad[which])
                    if kind == "same":
                        self.last[id(t)][which] = full.view_as(t.grad[which])


def _by_unit(values: Tensor, block: Block) -> Tensor:
    return values.reshape(len(values), block.units, -1)


def _order(count: int, epoch: int, seed: int, order: int) -> Tensor:
    return torch.randperm(
        count, generator=torch.Generator().manual_seed(seed + 1000 * order + 100_000 * epoch)
    )
