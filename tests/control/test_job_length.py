"""How long a job will be: what its flags, data loaders and Trainers tell."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from trimtab.control import job_length
from trimtab.control.job_length import JobLength, observe_loaders, requested_length

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.mark.parametrize(
    ("line", "epochs", "steps"),
    [
        ("--epochs 3", 3, None),
        ("--lr 0.1 --num_train_epochs=1.5 --seed 4", 1.5, None),
        ("--max-steps 500 --n-epochs 2", 2, 500),
        ("--total_training_iters=90", None, 90),
        ("--warmup-steps 10 --eval_steps 20 --save-steps=5 --gradient_accumulation_steps 4", None, None),
        ("--epochs", None, None),
        ("--epochs many --steps -3 --steps=0", None, None),
        ("epochs 3", None, None),
    ],
)
def test_flags_of_scripts(line: str, epochs: float | None, steps: int | None) -> None:
    assert requested_length(line.split()) == (epochs, steps)


@pytest.fixture(autouse=True)
def _observed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DataLoader, "__iter__", DataLoader.__iter__)  # put back afterwards
    monkeypatch.setattr(job_length._Seen, "epochs", [])
    monkeypatch.setattr(job_length._Seen, "trainer_state", None)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    observe_loaders()


def test_epochs_of_a_loader_with_accumulation_and_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--epochs", "3"])
    numbers: Any = range(50)
    data, held_out = DataLoader[int](numbers[:22], batch_size=2), DataLoader[int](numbers)
    length, step, known = JobLength(nn.Linear(1, 1)), 0, []
    for _ in range(2):
        for count, _batch in enumerate(data, 1):
            if count % 2 == 0 or count == 11:  # two batches a step, and the last has one
                step += 1
                known.append(length.after(step))
                assert len(list(held_out)) == 50  # evaluation between two steps
    assert known[0] == {"total_steps": None, "epoch_ends": None}, (
        "one step does not tell how many batches it takes"
    )
    assert known[1:5] == [{"total_steps": 18, "epoch_ends": 6}] * 4
    assert known[6:] == [{"total_steps": 18, "epoch_ends": 12}] * 6


def test_without_epochs_only_the_end_of_the_epoch_is_known() -> None:
    length = JobLength(nn.Linear(1, 1))
    for step, _batch in enumerate(DataLoader(range(10)), 1):  # type: ignore[arg-type]
        known = length.after(step)
    assert known == {"total_steps": None, "epoch_ends": 10}


def test_data_without_a_length_tells_nothing() -> None:
    class Endless(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    length = JobLength(nn.Linear(1, 1))
    known = [length.after(step) for step, _ in enumerate(DataLoader(Endless()), 1)]
    assert known == [{"total_steps": None, "epoch_ends": None}] * 3


def test_more_steps_than_announced_are_no_longer_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--max-steps=5"])
    length = JobLength(nn.Linear(1, 1))
    assert [length.after(step)["total_steps"] for step in (1, 5, 6)] == [5, 5, None]


def test_a_transformers_trainer_knows_its_steps() -> None:
    callback = pytest.importorskip("transformers.trainer_callback")
    length = JobLength(nn.Linear(1, 1))
    handler = callback.CallbackHandler([], None, None, None, None)
    state = callback.TrainerState(max_steps=100, global_step=40)  # resumed
    handler.on_train_begin(None, state, callback.TrainerControl())
    assert length.after(1)["total_steps"] == 60
    state.global_step = 49
    assert length.after(10)["total_steps"] == 60


@pytest.mark.parametrize(
    ("trainer", "total"),
    [
        ({"max_steps": 30}, 30),
        ({"max_steps": -1, "max_epochs": 4, "num_training_batches": 9, "accumulate_grad_batches": 2}, 20),
        (
            {
                "max_steps": -1,
                "max_epochs": 4,
                "num_training_batches": float("inf"),
                "accumulate_grad_batches": 1,
            },
            None,
        ),
        ({"max_steps": -1, "max_epochs": -1}, None),
        ({"max_steps": "many"}, None),
    ],
)
def test_a_lightning_module_has_its_trainer(trainer: dict[str, Any], total: int | None) -> None:
    module = nn.Linear(1, 1)
    module.trainer = SimpleNamespace(global_step=0, **trainer)  # type: ignore[assignment]
    assert JobLength(module).after(1)["total_steps"] == total
