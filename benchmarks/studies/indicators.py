"""How well does each indicator of damage rank operators, compared with what lowering them really does?

    python benchmarks/studies/indicators.py [--device cuda]

Models are trained for a while first: one that has learned nothing yet is hardly sensitive to rounding. Needs
`transformers` and `scikit-learn`.
"""

from __future__ import annotations

import math
import sys
import time
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from trimtab.bench.harness import AA, Result
from trimtab.measure.damage.indicators import INDICATORS, gradient_damage
from trimtab.measure.timing import synchronize
from trimtab.models import tasks
from trimtab.models.data import tokens
from trimtab.precision.devices import offers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from trimtab.predict.damage import Damage

    Batches = Callable[[int], Any]

TRAINED = 40
"""Steps before the indicators are computed."""

BATCHES = 2
TRUTH = "measured"


def indicator_rows(
    progress: Callable[[int, int], None],
    *,
    models: Sequence[str] = ("gpt", "resnet", "bert"),
    device: str = "cpu",
    trained: int = TRAINED,
    batches: int = BATCHES,
) -> list[dict[str, Any]]:
    """For each model and indicator: rank correlation with the measured damage, and cost in training steps.

    `correlation` is over all operators and precisions; `correlation_bf16` and so on over the operators within
    one precision, which is the harder question and the one that plans ask. `scale` is the median of predicted
    over measured. The last row of a model measures the truth again, on other batches: no indicator can be
    expected to do better.
    """
    threads = torch.get_num_threads()
    if device == "cpu":
        torch.set_num_threads(1)
    try:
        rows: list[dict[str, Any]] = []
        for done, name in enumerate(models):
            rows += _model_rows(name, torch.device(device), trained, batches)
            progress(done + 1, len(models))
        return rows
    finally:
        torch.set_num_threads(threads)


def indicator_summary(rows: Sequence[dict[str, Any]]) -> dict[str, float | bool | str]:
    """The worst of the models for `variance`, over all and within a precision, and the best of the alternatives."""
    own = [row for row in rows if row["indicator"] == "variance"]
    others = {row["indicator"] for row in rows} - {"variance", TRUTH, TRUTH + AA}
    means = {
        name: float(np.mean([row["correlation"] for row in rows if row["indicator"] == name]))
        for name in others
    }
    best = max(means, key=means.__getitem__)
    within = [value for row in own for key, value in row.items() if key.startswith("correlation_")]
    return {
        "correlation": min(row["correlation"] for row in own),
        "correlation_within_precision": min(within),
        "cost_steps": max(row["cost_steps"] for row in own),
        "best_alternative": best,
        "best_alternative_correlation": min(r["correlation"] for r in rows if r["indicator"] == best),
    }


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Correlation of ranks; equal values share the mean of theirs. NaN where all of one side are equal."""
    x, y = (_ranks(np.asarray(values, dtype=np.float64)) for values in (a, b))
    x, y = x - x.mean(), y - y.mean()
    size = math.sqrt(float((x * x).sum() * (y * y).sum()))
    return float((x * y).sum()) / size if size else math.nan


def _ranks(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    ranks: np.ndarray[Any, Any] = (np.cumsum(count) - (count - 1) / 2)[place]
    return ranks


def _model_rows(name: str, device: torch.device, trained: int, batches: int) -> list[dict[str, Any]]:
    model, batch_of = _subject(name, device)
    seconds = _train(model, batch_of, device, trained)
    offered = offers(device)["linear"]
    precisions = [p for p in ("bf16", "fp8", "int8") if p in offered]

    def timed(indicator: str, first: int = 1000) -> tuple[Damage, float]:
        chosen = [batch_of(first + i) for i in range(batches)]
        start = time.perf_counter()
        damages = gradient_damage(model, chosen, precisions=precisions, indicator=indicator)
        return damages, time.perf_counter() - start

    truth, truth_s = timed(TRUTH)
    rows = []
    for indicator in INDICATORS:
        damages, cost_s = (truth, truth_s) if indicator == TRUTH else timed(indicator)
        if indicator != TRUTH:
            cost_s = min(cost_s, timed(indicator)[1])
        rows.append(_row(name, indicator, damages, truth, cost_s / seconds))
    again, cost_s = timed(TRUTH, first=2000)
    return [*rows, _row(name, TRUTH + AA, again, truth, cost_s / seconds)]


def _row(model: str, indicator: str, damages: Damage, truth: Damage, cost: float) -> dict[str, Any]:
    everything = [(name, p) for name, by in truth.items() for p in by]
    row: dict[str, Any] = {
        "model": model,
        "indicator": indicator,
        "operators": len(truth),
        "correlation": spearman(*_values(damages, truth, everything)),
    }
    for precision in dict.fromkeys(p for _, p in everything):
        row[f"correlation_{precision}"] = spearman(
            *_values(damages, truth, [key for key in everything if key[1] == precision])
        )
    ratios = [a / b for a, b in zip(*_values(damages, truth, everything), strict=True) if b > 0]
    row["scale"] = median(ratios) if indicator in ("variance", TRUTH, TRUTH + AA) else None
    row["cost_steps"] = cost
    return row


def _values(
    damages: Damage, truth: Damage, keys: Sequence[tuple[str, str]]
) -> tuple[list[float], list[float]]:
    return [damages[name][p] for name, p in keys], [truth[name][p] for name, p in keys]


def _train(model: nn.Module, batch_of: Batches, device: torch.device, steps: int) -> float:
    """Train; returns the seconds of a step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    seconds = []
    for step in range(steps):
        start = time.perf_counter()
        batch = batch_of(step)
        optimizer.zero_grad()
        result = model(**batch) if isinstance(batch, dict) else model(*batch)
        getattr(result, "loss", result).backward()
        optimizer.step()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return median(seconds[steps // 2 :])


def _subject(name: str, device: torch.device) -> tuple[nn.Module, Batches]:
    """A model and its batches by step."""
    if name == "bert":
        return _bert(device)
    if name == "gpt":
        task = tasks.gpt(width=128, layers=4, heads=4, context=64, samples=8, device=device)
        return task.model, lambda step: task.batch(step=step)
    task = tasks.resnet(16, device)

    def batch(step: int) -> tuple[torch.Tensor, ...]:
        images, labels = task.batch(step=step)
        # Larger, so that the last layers still have more than one place to look at.
        return F.interpolate(images, scale_factor=4, mode="bilinear"), labels

    return task.model, batch


def _bert(device: torch.device) -> tuple[nn.Module, Batches]:
    """Masked bytes of text to predict; with dropout."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=256,
        hidden_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=384,
        max_position_embeddings=64,
    )

    def batch(step: int) -> dict[str, torch.Tensor]:
        text = tokens(8, 48, step=step)
        hidden = torch.rand(text.shape, generator=torch.Generator().manual_seed(step)) < 0.2
        return {
            "input_ids": torch.where(hidden, 0, text).to(device),
            "labels": torch.where(hidden, text, -100).to(device),
        }

    model: nn.Module = BertForMaskedLM(config)
    return model.to(device), batch


if __name__ == "__main__":
    rows = indicator_rows(lambda done, total: None, device="cuda" if "cuda" in sys.argv else "cpu")
    print(Result(bench="indicators", summary=indicator_summary(rows), rows=rows).to_json())
