"""ZERO-resizing: a slow rank leaves part of its own units or columns out of the products for a while.

Nothing moves and no collective changes, so only the slow rank calls `set_resize`. Which part is left out is chosen
anew every window of steps, by `trimtab.planning.tensor.resizing`; how it is left out is `trimtab.sharding.cut`.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch

from trimtab.errors import TrimtabError
from trimtab.planning.tensor.resizing import RETURN, Pool, check_ratio, choose, even_counts, pooled_counts
from trimtab.sharding.cut import Cut, Impute, Slices
from trimtab.sharding.optimizer_hooks import OptimizerHooks
from trimtab.sharding.projection import InProjection
from trimtab.sharding.slice_scores import ActivationNorms, WeightChanges
from trimtab.sharding.unit_block import ShardedModel, sharded_model

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray
    from torch import nn

    from trimtab.sharding.slice_scores import SliceScores
    from trimtab.sharding.unit_block import UnitBlock

    _Numbers = dict[str, NDArray[np.float64]]

Selection = Literal["random", "priority", "priority-per-layer", "activation"]
Form = Literal["unit", "column"]

WINDOW = 8
"""Optimiser steps between two choices."""

_AXES: dict[str, tuple[str, ...]] = {"unit": ("units",), "column": ("ins", "outs")}
_ALL = ("units", "ins", "outs")


def watch_resize(model: nn.Module | ShardedModel, *, window: int = WINDOW, returns: int = RETURN) -> None:
    """Keep the statistics that choices need, window by window, also while nothing is left out; call on every rank.

    Costs a copy of the rank's units, and about two passes over it each window. `set_resize` does it where it was
    not done, and then the first window is chosen at random.

    Args:
        window: optimiser steps between two choices.
        returns: windows after which at the latest what was left out comes back.
    """
    sharded = _sharded(model, "watch_resize")
    if window < 1 or returns < 1:
        raise TrimtabError(
            f"watch_resize: window={window} and returns={returns} are numbers of at least 1, of steps and of windows"
        )
    watching = _find(sharded)
    if watching is None:
        sharded.listeners.append(_Resizing(sharded, window, returns))
    else:
        watching.window, watching.returns = window, returns


def set_resize(
    model: nn.Module | ShardedModel,
    ratio: float,
    *,
    selection: Selection = "priority",
    form: Form = "unit",
    impute: Impute = "zero",
    seed: int = 0,
) -> None:
    """Leave a part of this rank's products out, from the next forward pass on; call it between two steps.

    Only the rank that is to do less calls it; collectives keep their number, order and shape on all. Only training
    passes are cut (those of `model.train()`); evaluation is always in full. With data parallelism around it, every copy
    of the rank calls it alike, and not by activations, since the copies see other data.

    Args:
        ratio: the part to leave out, at least 0 and below 1; every block keeps at least one unit or column.
        selection: what is left out: ``"random"``; ``"priority"``, what changed least when it was last in;
            ``"priority-per-layer"``, likewise over all layers, so that some lose more than others; ``"activation"``,
            what bounds the error of the products, ‖X‖‖W‖.
        form: ``"unit"``, hidden units and heads as a whole; ``"column"``, entries over which each product sums.
        impute: gradients of what is left out: ``"zero"``, and it is frozen; ``"average"`` of what is in;
            ``"same"`` as when it was last in.
        seed: of the random choices.
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
    watching = _find(sharded)
    assert watching is not None
    setting = _Setting(ratio=ratio, selection=selection, form=form, impute=impute, seed=seed)
    if setting != watching.setting:
        watching.setting = setting
        watching.turn()


def clear_resize(model: nn.Module | ShardedModel) -> None:
    """Compute everything again, from the next forward pass on; the statistics are kept up."""
    watching = _find(_sharded(model, "clear_resize"))
    if watching is not None and watching.setting is not None:
        watching.setting = None
        watching.turn()


def resized(model: nn.Module | ShardedModel) -> float:
    """The part of what this rank would compute of its blocks that is left out now, after rounding; 0 if nothing is."""
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
    """What is known of every slice along one axis of a block, by global number; NaN: nothing yet."""

    changed: NDArray[np.float64]
    active: NDArray[np.float64]
    waited: NDArray[np.int64]

    @classmethod
    def of(cls, count: int) -> _Known:
        nothing = np.full(count, np.nan)
        return cls(changed=nothing, active=nothing.copy(), waited=np.zeros(count, dtype=np.int64))


@dataclass(eq=False)
class _Resizing:
    """What one rank leaves out, and what it knows for the next choice."""

    sharded: ShardedModel
    window: int
    returns: int
    setting: _Setting | None = None
    _steps: int = 0
    """Optimiser steps of this window so far."""
    _windows: int = 0
    _known: dict[tuple[str, str], _Known] = field(default_factory=dict)
    _changes: dict[str, WeightChanges] = field(default_factory=dict)
    _looked: dict[str, int] = field(default_factory=dict)
    """At which step of this window the changes of a block are counted from."""

    def __post_init__(self) -> None:
        for block in self.sharded.blocks.values():
            for axis in _ALL:
                self._known[block.name, axis] = _Known.of(_total(block, axis))
            self._changes[block.name] = WeightChanges(block)
            self._looked[block.name] = 0
        self._hooks = OptimizerHooks(self.sharded, self._stepped)

    def __call__(self, block: UnitBlock) -> None:
        """The block computes other units now."""
        self._look(block)
        self._choose([block])

    def turn(self) -> None:
        """End a window: learn from it and choose for the next."""
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
            self.turn()

    def _learn(self, block: UnitBlock, changed: _Numbers) -> None:
        """How much everything changed in this window; what was frozen keeps what was known of it."""
        for axis, known, numbers in self._axes(block):
            moved = np.ones(len(numbers), dtype=np.bool_)
            if block.cut is not None and block.cut.impute == "zero":
                slices = getattr(block.cut, axis)
                moved[slice(None) if slices is None else slices.left.tolist()] = False
            values = changed[axis][moved]
            # In proportion to the others: what was measured while the learning rate was another must compare.
            known.changed[numbers[moved]] = values / (values.mean() if values.any() else 1.0)
        self._look(block)

    def _look(self, block: UnitBlock) -> None:
        self._changes[block.name].snapshot()
        self._looked[block.name] = self._steps

    def _measure(self) -> None:
        """Take up the activations of the window's first step."""
        seen = []
        for block in self.sharded.blocks.values():
            bounds = None if block.activation_norms is None else block.activation_norms.bounds()
            block.activation_norms = None
            if bounds is not None:
                seen.append((block, bounds))
        for (block, _), values in zip(seen, _fetched([bounds for _, bounds in seen]), strict=True):
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
        """What may be left out: not what is computed for or by others."""
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
    return next(t.axis.width for t in block.tensors if not isinstance(t.module, InProjection))


def _total(block: UnitBlock, axis: str) -> int:
    if axis == "ins":
        return next(t.parameter.shape[1] for t in block.tensors if t.attribute == "weight")
    return block.units * (1 if axis == "units" else _out_width(block))


def _numbers(block: UnitBlock, axis: str) -> NDArray[np.int64]:
    """The global number of every slice that is here, by slot."""
    if axis == "ins":
        return np.arange(_total(block, axis))
    units = block.table.slots[block.group.rank]
    width = 1 if axis == "units" else _out_width(block)
    return (units[:, None] * width + np.arange(width)).flatten()


def _cost(block: UnitBlock, axis: str) -> float:
    """Weights that one slice multiplies with."""
    cost = 0
    for tensor in block.tensors:
        if tensor.attribute == "weight":
            into, row = isinstance(tensor.module, InProjection), tensor.parameter.shape[1]
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
    """As arrays, by axis; all of them in one copy from the device."""
    if not sizes:
        return []
    tensors = [getattr(each, axis) for each in sizes for axis in _ALL]
    whole = torch.cat(tensors).double().cpu().numpy()
    pieces = iter(np.split(whole, np.cumsum([len(tensor) for tensor in tensors])[:-1]))
    return [{axis: next(pieces) for axis in _ALL} for _ in sizes]
