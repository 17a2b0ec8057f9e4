"""Part of `trimtab bench hybrid`: how well each indicator ranks operators, against what lowering them really does.

Models are trained for a while first: one that knows nothing yet hardly cares where it is rounded.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from trimtab.bench.harness import AA
from trimtab.bench.scenarios.adaptive.tasks import task
from trimtab.measure.damage.indicators import INDICATORS, gradient_damage
from trimtab.models.gpt import Gpt, batch_of, text_bytes
from trimtab.precision.devices import offers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from trimtab.predict.damage import Damage

TRAINED = 40
"""Steps before the model is looked at."""

BATCHES = 2
TRUTH = "measured"


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model that gives its loss, and its batches by step."""

    model: nn.Module
    batch: Callable[[int], Any]


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
    subject = _subject(name, device)
    step = _training(subject, device)
    seconds = median([step(i) for i in range(trained)][trained // 2 :])
    offered = offers(device)["linear"]
    precisions = [p for p in ("bf16", "fp8", "int8") if p in offered]

    def timed(indicator: str, first: int = 1000) -> tuple[Damage, float]:
        given = [subject.batch(first + i) for i in range(batches)]
        start = time.perf_counter()
        found = gradient_damage(subject.model, given, precisions=precisions, indicator=indicator)
        return found, time.perf_counter() - start

    truth, truth_s = timed(TRUTH)
    rows = []
    for indicator in INDICATORS:
        found, taken = (truth, truth_s) if indicator == TRUTH else timed(indicator)
        if indicator != TRUTH:
            taken = min(taken, timed(indicator)[1])
        rows.append(_row(name, indicator, found, truth, taken / seconds))
    again, taken = timed(TRUTH, first=2000)
    return [*rows, _row(name, TRUTH + AA, again, truth, taken / seconds)]


def _row(model: str, indicator: str, found: Damage, truth: Damage, cost: float) -> dict[str, Any]:
    everything = [(name, p) for name, by in truth.items() for p in by]
    row: dict[str, Any] = {
        "model": model,
        "indicator": indicator,
        "operators": len(truth),
        "correlation": spearman(*_values(found, truth, everything)),
    }
    for precision in dict.fromkeys(p for _, p in everything):
        row[f"correlation_{precision}"] = spearman(
            *_values(found, truth, [key for key in everything if key[1] == precision])
        )
    ratios = [a / b for a, b in zip(*_values(found, truth, everything), strict=True) if b > 0]
    row["scale"] = median(ratios) if indicator in ("variance", TRUTH, TRUTH + AA) else None
    row["cost_steps"] = cost
    return row


def _values(found: Damage, truth: Damage, keys: Sequence[tuple[str, str]]) -> tuple[list[float], list[float]]:
    return [found[name][p] for name, p in keys], [truth[name][p] for name, p in keys]


def _training(subject: Subject, device: torch.device) -> Callable[[int], float]:
    optimiser = torch.optim.AdamW(subject.model.parameters(), lr=1e-3)

    def step(index: int) -> float:
        start = time.perf_counter()
        batch = subject.batch(index)
        optimiser.zero_grad()
        result = subject.model(**batch) if isinstance(batch, dict) else subject.model(*batch)
        getattr(result, "loss", result).backward()
        optimiser.step()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return time.perf_counter() - start

    return step


def _subject(name: str, device: torch.device) -> Subject:
    torch.manual_seed(0)
    if name == "gpt":
        text = text_bytes(1 << 18)
        model: nn.Module = Gpt(width=128, layers=4, heads=4, context=64)
        return Subject(model=model.to(device), batch=lambda step: (batch_of(text, step, 8, 64).to(device),))
    if name == "bert":
        return _bert(device)
    made = task("resnet")

    def batch(step: int) -> tuple[torch.Tensor, ...]:
        images, labels = made.inputs(0, step, 0)
        # Larger, so that the last layers still have more than one place to look at.
        images = F.interpolate(images, scale_factor=4, mode="bilinear")
        return images.to(device), labels.to(device)

    return Subject(model=made.build().to(device), batch=batch)


def _bert(device: torch.device) -> Subject:
    """Bytes left out of text, to be guessed; with dropout."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=256,
        hidden_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=384,
        max_position_embeddings=64,
    )
    text = text_bytes(1 << 18)

    def batch(step: int) -> dict[str, torch.Tensor]:
        tokens = batch_of(text, step, 8, 48)
        hidden = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(step)) < 0.2
        return {
            "input_ids": torch.where(hidden, 0, tokens).to(device),
            "labels": torch.where(hidden, tokens, -100).to(device),
        }

    model: nn.Module = BertForMaskedLM(config)
    return Subject(model=model.to(device), batch=batch)
