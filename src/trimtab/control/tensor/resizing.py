"""ZERO-resizing: a slow rank prunes part of its own units or columns for a while.

Nothing moves and no collective changes, so only the slow rank calls `set_resize`. What is pruned is chosen again in
every window of steps by `trimtab.planning.tensor.resizing`; `trimtab.sharding.cut` prunes it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from trimtab.errors import TrimtabError
from trimtab.planning.tensor.balance import Form, Selection
from trimtab.planning.tensor.resizing import RETURN, Pool, check_ratio, choose, even_counts, pooled_counts
from trimtab.sharding.cut import Cut, Impute, Slices
from trimtab.sharding.optimizer_hooks import OptimizerHooks
from trimtab.sharding.slice_scores import ActivationNorms, SliceScores, WeightChanges
from trimtab.sharding.unit_block import ShardedModel, UnitBlock, sharded_model

_Numbers = dict[str, NDArray[np.float64]]

WINDOW = 8
"""Optimizer steps between two choices."""

_AXES: dict[str, tuple[str, ...]] = {"unit": ("units",), "column": ("ins", "outs")}
_ALL = ("units", "ins", "outs")


def watch_resize(model: nn.Module | ShardedModel, *, window: int = WINDOW, returns: int = RETURN) -> None:
    """Collect the statistics for choices in every window, also while nothing is pruned; call it on every rank.

    Costs a copy of the rank's units, and about two passes over it per window. Without it, `set_resize` starts
    collecting and chooses at random in the first window.

    Args:
        window: optimizer steps between two choices.
        returns: windows after which a pruned slice is computed again at the latest.
    """
    sharded = _sharded(model, "watch_resize")
    if window < 1 or returns < 1:
        raise TrimtabError(
            f"watch_resize: window (in steps) and returns (in windows) must be at least 1, got {window} and {returns}"
        )
    resizing = _find(sharded)
    if resizing is None:
        sharded.listeners.append(_Resizing(sharded, window, returns))
    else:
        resizing.window, resizing.returns = window, returns


def set_resize(
    model: nn.Module | ShardedModel,
    ratio: float,
    *,
    selection: Selection = "priority",
    form: Form = "unit",
    impute: Impute = "zero",
    seed: int = 0,
) -> None:
    """Prune a fraction of this rank's work, from the next forward pass on; call it between two steps.

    Only the rank that should do less calls it; collectives keep their number, order and shape on all ranks. Only
    training passes are pruned (`model.train()`), never evaluation. With data parallelism around it, every replica of
    the rank makes the same call, and not with ``"activation"``, because replicas see different data.

    Args:
        ratio: the fraction to prune, at least 0 and below 1; every block keeps at least one unit or column.
        selection: what is pruned: ``"random"``; ``"priority"``: what changed least when it was last computed;
            ``"priority-per-layer"``: the same over all layers, so that some lose more than others; ``"activation"``:
            the smallest ‖X‖‖W‖, which bounds the error of the products.
        form: ``"unit"``: whole hidden units and heads; ``"column"``: columns over which each product sums.
        impute: gradients of pruned parameters: ``"zero"``, which freezes them; ``"average"`` of those computed;
            ``"same"`` as when they were last computed.
        seed: seed of the random choices.
    """
    sharded = _sharded(model, "set_resize")
    sharded.check()
    check_ratio(ratio)
    for name, value, known in (
        ("selection", selection, Selection),
        ("form", form, Form),
        ("impute", impute, Impute),
    ):
        if value not in get_args(known):
            raise TrimtabError(
                f"set_resize: {name}={value!r} is unknown; choose {', '.join(get_args(known))}"
            )
    if _find(sharded) is None:
        watch_resize(sharded)
    resizing = _find(sharded)
    assert resizing is not None
    setting = _Setting(ratio=ratio, selection=selection, form=form, impute=impute, seed=seed)
    if setting != resizing.setting:
        resizing.setting = setting
        resizing.next_window()


def clear_resize(model: nn.Module | ShardedModel) -> None:
    """Compute everything again, from the next forward pass on; statistics are still collected."""
    resizing = _find(_sharded(model, "clear_resize"))
    if resizing is not None and resizing.setting is not None:
        resizing.setting = None
        resizing.next_window()


def resized(model: nn.Module | ShardedModel) -> float:
    """The fraction of this rank's work that is pruned now, after rounding to whole units or columns."""
    left = whole = 0.0
    for block in _sharded(model, "resized").blocks.values():
        for axis in _ALL:
            slices = None if block.cut is None else getattr(block.cut, axis)
            left += 0.0 if slices is None else len(slices.left) * _cost(block, axis)
        whole += block.places[1] * _cost(block, "units")
    return left / whole if whole else 0.0


@dataclass(frozen=True, kw_only=True)
class _Setting:
    ratio: float
    selection: Selection
    form: Form
    impute: Impute
    seed: int


@dataclass(kw_only=True, eq=False)
class _Known:
    """Statistics of every slice along one axis of a block, by global index; NaN if unknown."""

    changed: NDArray[np.float64]
    active: NDArray[np.float64]
    waited: NDArray[np.int64]

    @classmethod
    def of(cls, count: int) -> _Known:
        nothing = np.full(count, np.nan)
        return cls(changed=nothing, active=nothing.copy(), waited=np.zeros(count, dtype=np.int64))


@dataclass(eq=False)
class _Resizing:
    """What one rank prunes, and its statistics for the next choice."""

    sharded: ShardedModel
    window: int
    returns: int
    setting: _Setting | None = None
    _steps: int = 0
    """Optimizer steps of this window so far."""
    _windows: int = 0
    _known: dict[tuple[str, str], _Known] = field(default_factory=dict)
    _changes: dict[str, WeightChanges] = field(default_factory=dict)
    _looked: dict[str, int] = field(default_factory=dict)
    """The step of this window from which a block's changes are counted."""

    def __post_init__(self) -> None:
        for block in self.sharded.blocks.values():
            if all(tensor.into for tensor in block.tensors):
                raise TrimtabError(
                    f"set_resize: {block.name} consists of experts or of a vocabulary, which cannot be pruned; use "
                    "resize=0"
                )
            for axis in _ALL:
                self._known[block.name, axis] = _Known.of(_total(block, axis))
            self._changes[block.name] = WeightChanges(block)
            self._looked[block.name] = 0
        self._hooks = OptimizerHooks(self.sharded, self._stepped)

    def __call__(self, block: UnitBlock) -> None:
        """Called when the block's units have changed."""
        self._look(block)
        self._choose([block])

    def next_window(self) -> None:
        """End a window: update the statistics and choose for the next one."""
        blocks = [b for b in self.sharded.blocks.values() if self._steps > self._looked[b.name]]
        sizes = [self._changes[block.name].since() for block in blocks]
        for block, changed in zip(blocks, _fetched(sizes), strict=True):
            self._learn(block, changed)
        self._windows += 1
        self._steps = 0
        self._looked = dict.fromkeys(self._looked, 0)
        self._choose(self.sharded.blocks.values())

    def _stepped(self) -> None:
        self._steps += 1
        if self._steps == 1:
            self._measure()
        if self._steps >= self.window:
            self.next_window()

    def _learn(self, block: UnitBlock, changed: _Numbers) -> None:
        """Record how much each slice changed in this window; frozen slices keep their earlier values."""
        for axis, known, numbers in self._axes(block):
            moved = np.ones(len(numbers), dtype=np.bool_)
            if block.cut is not None and block.cut.impute == "zero":
                slices = getattr(block.cut, axis)
                moved[slice(None) if slices is None else slices.left.tolist()] = False
            values = changed[axis][moved]
            # Relative to the others, so that values from different learning rates can be compared.
            known.changed[numbers[moved]] = values / (values.mean() if values.any() else 1.0)
        self._look(block)

    def _look(self, block: UnitBlock) -> None:
        self._changes[block.name].snapshot()
        self._looked[block.name] = self._steps

    def _measure(self) -> None:
        """Record the activation norms of the window's first step."""
        measured = []
        for block in self.sharded.blocks.values():
            bounds = None if block.activation_norms is None else block.activation_norms.bounds()
            block.activation_norms = None
            if bounds is not None:
                measured.append((block, bounds))
        for (block, _), values in zip(measured, _fetched([bounds for _, bounds in measured]), strict=True):
            for axis, known, numbers in self._axes(block):
                computed = ~np.isnan(values[axis])
                known.active[numbers[computed]] = values[axis][computed]

    def _axes(self, block: UnitBlock) -> Iterable[tuple[str, _Known, NDArray[np.int64]]]:
        return [(axis, self._known[block.name, axis], _numbers(block, axis)) for axis in _ALL]

    def _choose(self, blocks: Iterable[UnitBlock]) -> None:
        setting = self.setting
        if setting is None or setting.ratio == 0:
            for block in blocks:
                block.cut = None
                for _, known, _ in self._axes(block):
                    known.waited[:] = 0
            return
        for block in blocks:
            if block.places[0] == 0:
                block.cut = None
        blocks = [block for block in blocks if block.places[0] > 0]
        chosen: dict[str, dict[str, Slices]] = {block.name: {} for block in blocks}
        for axis in _AXES[setting.form]:
            pools = {block.name: self._pool(block, axis, setting) for block in blocks}
            pooled = setting.selection == "priority-per-layer"
            counts = (pooled_counts if pooled else even_counts)(pools, setting.ratio)
            for block in blocks:
                left = choose(pools[block.name], counts[block.name], self.returns)
                waited = self._known[block.name, axis].waited
                numbers = _numbers(block, axis)[: len(left)]
                waited[numbers] = np.where(left, waited[numbers] + 1, 0)
                chosen[block.name][axis] = _slices(block, axis, left)
        for block in blocks:
            before = block.cut
            last = before.last if before is not None and before.impute == setting.impute else {}
            slices: Mapping[str, Any] = chosen[block.name]
            block.cut = Cut(impute=setting.impute, places=block.places, last=last, **slices)
            if setting.selection == "activation":
                block.activation_norms = ActivationNorms(block)

    def _pool(self, block: UnitBlock, axis: str, setting: _Setting) -> Pool:
        """What may be pruned: not what is computed for or by other ranks."""
        known = self._known[block.name, axis]
        numbers = _numbers(block, axis)
        if axis != "ins":
            numbers = numbers[: block.places[0] * len(numbers) // max(1, block.count)]
        key = (
            setting.seed,
            self._windows,
            self.sharded.group.rank,
            zlib.crc32(f"{block.name}.{axis}".encode()),
        )
        draws = np.random.default_rng(key).random(len(numbers))
        if setting.selection == "random":
            scores = draws
        else:
            table = known.active if setting.selection == "activation" else known.changed
            scores = table[numbers]
            if np.isnan(scores).all():
                scores = draws
        return Pool(scores=scores, waited=known.waited[numbers], cost=_cost(block, axis))


def _slices(block: UnitBlock, axis: str, left: NDArray[np.bool_]) -> Slices:
    own, every = block.places
    beyond = 0 if axis == "ins" else (every - own) * len(left) // own
    kept = np.concatenate([~left, np.ones(beyond, dtype=np.bool_)])
    device = block.tensors[0].parameter.device
    return Slices(
        kept=torch.as_tensor(np.flatnonzero(kept), device=device),
        left=torch.as_tensor(np.flatnonzero(left), device=device),
    )


def _out_width(block: UnitBlock) -> int:
    return next(t.axis.width for t in block.tensors if not t.into)


def _total(block: UnitBlock, axis: str) -> int:
    if axis == "ins":
        return next(t.parameter.shape[1] for t in block.tensors if t.into and t.parameter.ndim > 1)
    return block.units * (1 if axis == "units" else _out_width(block))


def _numbers(block: UnitBlock, axis: str) -> NDArray[np.int64]:
    """The global index of every slice on this rank, by slot."""
    if axis == "ins":
        return np.arange(_total(block, axis))
    units = block.table.slots[block.group.rank]
    width = 1 if axis == "units" else _out_width(block)
    return (units[:, None] * width + np.arange(width)).flatten()


def _cost(block: UnitBlock, axis: str) -> float:
    """Weights that one slice is multiplied with."""
    cost = 0
    for tensor in block.tensors:
        if tensor.parameter.ndim > 1:
            into, row = tensor.into, tensor.parameter.shape[1]
            if axis == "units":
                cost += tensor.axis.width * row
            elif axis == "ins" and into:
                cost += block.places[1] * tensor.axis.width
            elif axis == "outs" and not into:
                cost += row
    return float(cost)


def _sharded(model: nn.Module | ShardedModel, verb: str) -> ShardedModel:
    return model if isinstance(model, ShardedModel) else sharded_model(model, verb)


def _find(sharded: ShardedModel) -> _Resizing | None:
    return next((each for each in sharded.listeners if isinstance(each, _Resizing)), None)


def _fetched(sizes: list[SliceScores]) -> list[_Numbers]:
    """As arrays by axis, copied from the device all at once."""
    if not sizes:
        return []
    tensors = [getattr(each, axis) for each in sizes for axis in _ALL]
    whole = torch.cat(tensors).double().cpu().numpy()
    pieces = iter(np.split(whole, np.cumsum([len(tensor) for tensor in tensors])[:-1]))
    return [{axis: next(pieces) for axis in _ALL} for _ in sizes]
