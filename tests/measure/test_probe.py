"""Probing: what is kept is not measured again, directions are not mixed up, a table of what was found."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from tests.measure.probes import CPU, group_of_one, task, tiny
from tests.predict.profiles import cluster
from torch.optim.optimizer import register_optimizer_step_post_hook

from trimtab.cli.probe import rows
from trimtab.cluster import load_cluster, save_cluster
from trimtab.errors import TrimtabError
from trimtab.measure.cache import ProbeCache
from trimtab.measure.capture.capture import capture_workload
from trimtab.measure.device import (
    ROUNDS,
    WARMUP,
    DeviceProbe,
)
from trimtab.measure.kernels import cast, codec_times
from trimtab.measure.links import LinkProbe
from trimtab.measure.probe import classify, merge_files, probe
from trimtab.measure.products import usual_precisions
from trimtab.models.gpt import Gpt
from trimtab.models.spec import load_model
from trimtab.predict.collectives import Placement, all_reduce
from trimtab.predict.operators.costs import workload_key

if TYPE_CHECKING:
    from pathlib import Path


def test_an_interrupted_probe_goes_on_where_it_stopped(tmp_path: Path) -> None:
    model, batch = tiny()

    def cache() -> ProbeCache:
        found = ProbeCache("cpu", "x", torch="t", trimtab="v", folder=tmp_path)
        found.load()
        return found

    def interrupted(done: int, total: int) -> None:
        assert total == 3 + 2 * (WARMUP + ROUNDS)
        if done == 3 + 2 * WARMUP + 3:
            raise KeyboardInterrupt

    with group_of_one():
        nothing, left = DeviceProbe(task(model, batch, seconds=0.0), CPU, cache()).run(
            lambda done, total: pytest.fail("without time nothing is begun")
        )
        assert len(left) == 5
        assert not nothing.operators
        with pytest.raises(KeyboardInterrupt):
            DeviceProbe(task(model, batch), CPU, cache()).run(interrupted)
        kept = cache()
        assert kept.done == {"codec 4", "codec adaptive", "launch"}
        assert [len(steps) for steps in kept.steps.values()] == [2, 1]
        measured: list[tuple[int, int]] = []
        profile, left = DeviceProbe(task(model, batch), CPU, kept).run(
            lambda done, total: measured.append((done, total))
        )
        assert not left
        assert measured[-1] == (len(measured), 2 * WARMUP + 2 * ROUNDS - 3), "only what was missing"
        assert profile.codec == cache().profile.codec
        again, left = DeviceProbe(task(model, batch), CPU, cache()).run(
            lambda done, total: pytest.fail("measured")
        )
        assert again == profile
        assert not left


def test_too_little_time_gives_fewer_rounds_and_says_so(tmp_path: Path) -> None:
    model, batch = tiny()
    cache = ProbeCache("cpu", "x", torch="t", trimtab="v", folder=tmp_path)

    def late(done: int, total: int) -> None:
        if done == 2 + 2 * WARMUP + 3:
            device_probe._start -= 1000  # as if so many seconds had passed

    with group_of_one():
        device_probe = DeviceProbe(task(model, batch, seconds=900.0), CPU, cache)
        found, left = device_probe.run(late)
    assert [name.split(" batch ")[1] for name in left] == ["2 plain", "3 plain"]
    assert list(found.batches.values()) == [(2, 3)], "what there is can be used"
    assert not cache.profile.batches, "but is not kept as if it were whole"


def test_a_waiting_job_is_not_kept_by_what_is_known_already(tmp_path: Path) -> None:
    """The optimizer takes as long in any precision, and error feedback with any bits."""
    model, batch = tiny()
    cache = ProbeCache("cpu", "x", torch="t", trimtab="v", folder=tmp_path, keep=False)
    updates: list[Any] = []
    hook = register_optimizer_step_post_hook(lambda *_: updates.append(None))
    quick = task(model, batch, precisions=("bf16",), bits=(8, 4), quick=True)
    try:
        with group_of_one():
            found, left = DeviceProbe(quick, CPU, cache).run(lambda done, total: None)
    finally:
        hook.remove()
    assert left == []
    assert len(updates) == 1 + len(quick.batches), (
        "to allocate its state, and with each batch in the own precision"
    )
    assert found.optimiser is not None
    assert found.optimiser.a > 0
    assert {key.split("|")[-1] for key in found.operators if key.startswith("linear")} == {"fp32", "bf16"}
    assert found.adaptive_codec is not None
    assert found.codec["8"].feedback.a > 0
    assert found.codec["8"].feedback == found.codec["4"].feedback == found.adaptive_codec.feedback
    assert len({found.codec["8"].encode, found.codec["4"].encode, found.adaptive_codec.encode}) == 3


@pytest.mark.parametrize(
    ("offered", "autocast", "expected"),
    [
        (("fp32", "bf16", "fp16", "int8"), None, ("bf16", "int8")),
        (("fp32", "bf16", "fp16"), None, ("bf16",)),
        (("fp32", "bf16", "fp16", "int8"), "bf16", ("int8",)),
        (("fp32", "tf32", "bf16", "fp16", "fp8", "int8"), None, ("tf32", "bf16", "fp8")),
        (("fp32", "tf32", "bf16", "fp16", "fp8", "int8"), "bf16", ("fp8",)),
        (("fp32", "fp16", "int8"), None, ("fp16", "int8")),
        (("fp32",), None, ()),
    ],
)
def test_what_may_pay_off_is_probed(
    offered: tuple[str, ...],
    autocast: str | None,
    expected: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trimtab.measure.products.offers", lambda _: {"linear": offered})
    monkeypatch.setattr("trimtab.measure.products.is_hopeless", lambda *_: False)
    assert usual_precisions(CPU, autocast) == expected


def test_what_is_hopelessly_slow_is_not_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPUs without instructions for bf16 compute it about a hundred times slower than fp32."""
    monkeypatch.setattr(
        "trimtab.measure.products.offers", lambda _: {"linear": ("fp32", "bf16", "fp16", "int8")}
    )
    monkeypatch.setattr("trimtab.measure.products.is_hopeless", lambda name, _: name in ("bf16", "fp16"))
    assert usual_precisions(CPU) == ("int8",)


def test_the_cache_is_of_one_device_and_version(tmp_path: Path) -> None:
    one = ProbeCache("CPU A", "1", torch="2.13", trimtab="0.1", folder=tmp_path)
    others = [
        ProbeCache("CPU B", "1", torch="2.13", trimtab="0.1", folder=tmp_path),
        ProbeCache("CPU A", "2", torch="2.13", trimtab="0.1", folder=tmp_path),
        ProbeCache("CPU A", "1", torch="2.11", trimtab="0.1", folder=tmp_path),
        ProbeCache("CPU A", "1", torch="2.13", trimtab="0.2", folder=tmp_path),
    ]
    assert len({one.path, *(other.path for other in others)}) == 5


def test_an_emulated_device_leaves_nothing_behind(tmp_path: Path) -> None:
    cache = ProbeCache("cpu", "x", torch="t", trimtab="v", folder=tmp_path, keep=False)
    cache.add("unit", cache.profile)
    assert cache.done == {"unit"}
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"done": [], "profile": {"called": 1}}',
        '{"done": []}',
        '{"done": [], "profile": {"called": "x"}}',
        '{"done": [], "profile": {"called": "x"}, "steps": {"a": [1]}}',
        '{"done": [], "profile": {"called": "x"}, "steps": []}',
    ],
)
def test_a_damaged_cache_is_measured_anew(tmp_path: Path, text: str) -> None:
    cache = ProbeCache("cpu", "x", torch="t", trimtab="v", folder=tmp_path)
    cache.path.write_text(text)
    cache.load()
    assert cache.done == set()
    assert cache.profile.operators == {}


def test_the_model_is_as_it_was_after_probing(tmp_path: Path) -> None:
    model, batch = tiny()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    cache = ProbeCache("cpu", "x", torch="t", trimtab="v", folder=tmp_path)
    with group_of_one():
        DeviceProbe(task(model, batch, bits=()), CPU, cache).run(lambda done, total: None)
    assert set(model.state_dict()) == set(before)
    assert not any("forward" in m.__dict__ for m in model.modules())


def test_keys_tell_models_apart() -> None:
    one, two = tiny()[0], Gpt(width=48, layers=2, heads=2, context=16)
    batch = tiny()[1]
    assert workload_key(capture_workload(one, batch)) == workload_key(
        capture_workload(tiny()[0], batch).at_batch(5)
    )
    assert workload_key(capture_workload(one, batch)) != workload_key(capture_workload(two, batch))


@pytest.mark.parametrize(
    ("direction", "reads", "writes"),
    [
        ("fp32>bf16", torch.float32, torch.bfloat16),
        ("bf16>fp32", torch.bfloat16, torch.float32),
        ("fp32>int8", torch.float32, torch.int8),
        ("int8>fp32", torch.int8, torch.float32),
    ],
)
def test_casts_go_in_the_direction_they_are_named(
    direction: str, reads: torch.dtype, writes: torch.dtype
) -> None:
    seen: list[torch.dtype] = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.extend(a.dtype for a in args if isinstance(a, torch.Tensor) and a.numel() > 1024)
            return func(*args, **(kwargs or {}))

    run = cast(direction, 32, CPU)
    with Watch():
        result = run()
    assert result.dtype == writes
    assert seen[0] == reads


def test_no_cast_is_named() -> None:
    with pytest.raises(TrimtabError, match="'fp32>fp32' is not a cast"):
        cast("fp32>fp32", 8, CPU)
    with pytest.raises(TrimtabError, match="is not a cast"):
        cast("int4>fp32", 8, CPU)


def test_the_codec_is_fitted_in_both_directions() -> None:
    times = codec_times(4, CPU, rounds=1)
    assert all(line.a >= 0 and line.c >= 0 and line.a + line.c > 0 for line in vars(times).values())


def _probe_link() -> dict[str, list[tuple[float, ...]]]:
    trial = LinkProbe(Placement.of((2,)), CPU, rows=((1 << 12,) * 3, (1 << 16, 1 << 12)))
    trial.round()
    trial.round()
    return {
        k: [
            (f.per_message_s, f.per_byte_s, f.drag, f.awaited_message_s, f.awaited_byte_s, f.busy_message_s)
            for f in fits
        ]
        for k, fits in trial.fits().items()
    }


def test_every_rank_gets_the_same_figures_of_the_link(ranks: Any) -> None:
    one, two = ranks(2, _probe_link)
    assert one == two
    assert set(one) == {"all_reduce", "all_gather", "all_to_all"}
    for fits in one.values():
        assert len(fits) == 2
        assert all(m >= 0 and b >= 0 and m + b > 0 and min(rest) >= 0 for m, b, *rest in fits)
    assert any(busy > 0 for fits in one.values() for *_, busy in fits)


def _row_sums() -> list[tuple[float, float]]:
    """What is fitted to a row of transfers, and what that row took."""
    rows = ((1 << 12,) * 4, (1 << 18, 1 << 16, 1 << 18))
    placement = Placement.of((1, 1))
    trial = LinkProbe(placement, CPU, rows=rows, collectives=("all_reduce",))
    trial.round()
    found = trial.fits()["all_reduce"][0]
    sums = []
    for row in rows:
        fitted = sum(all_reduce(size, placement).seconds((found,)) for size in row)
        sums.append((fitted, trial._times["all_reduce", row][0]))
    return sums


def test_a_row_of_transfers_is_fitted_as_a_whole(ranks: Any) -> None:
    for sums in ranks(2, _row_sums):
        # Two rows, two unknowns. Where one of those would be negative, the larger row counts.
        fitted, taken = sums[-1]
        assert fitted == pytest.approx(taken)


def test_devices_of_one_name_and_speed_are_one_class() -> None:
    measured = [("X 1", 100.0), ("X 1", 95.0), ("X 1", 50.0), ("Y", 100.0)]
    classes, of_rank = classify([(*each, None) for each in measured], "cpu")
    assert of_rank[0] == of_rank[1]
    assert len(set(of_rank)) == len(classes) == 3
    assert classes[of_rank[2]].speed == pytest.approx(0.5)


def test_classes_keep_the_names_of_the_users_cluster_file() -> None:
    named = [("X 1", 100.0, "new"), ("X 1", 95.0, "new"), ("X 1", 90.0, "old"), ("X 1", 50.0, "old")]
    classes, of_rank = classify(named, "cpu")
    assert of_rank == ["new", "new", "old", "old-3"], "as alike as the file says, unless the speeds differ"
    assert [classes[name].speed for name in ("new", "old", "old-3")] == [1.0, 0.9, 0.5]


def test_the_table_says_what_a_plan_can_use() -> None:
    found = {row["what"]: row for row in rows(cluster())}
    assert list(found) == ["fast", "slow", "link lan", "link local"]
    assert found["fast"]["precisions"] == "fp32, int8", "and not the types of operators that cannot be set"
    assert found["fast"]["batches"] == "2, 6"
    assert found["fast"]["codec bits"] == "4"
    assert found["link lan"]["is"] == "all_to_all: 1 Gbit/s, 100 us"


def test_the_table_shows_the_probed_model_and_not_what_the_cache_holds_of_others() -> None:
    from tests.cli.test_away import on_gpus

    probed = on_gpus()
    assert probed.profile is not None
    own = rows(probed)[0]
    fast = probed.profile.devices["fast"]
    more = replace(
        fast,
        operators={**fast.operators, "linear|7x7x7|fp32|fp32": next(iter(fast.operators.values()))},
        batches={**fast.batches, "another": (8, 9)},
    )
    devices = {**probed.profile.devices, "fast": more}
    assert rows(replace(probed, profile=replace(probed.profile, devices=devices)))[0] == own
    assert own["operators"] > 0
    assert own["batches"] == "2, 6"


def test_probe_writes_a_cluster_that_merges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [str(tmp_path), *__import__("sys").path])
    (tmp_path / "own_model.py").write_text(
        "import torch\n"
        "def make():\n"
        "    return torch.nn.Sequential(torch.nn.Linear(8, 8)), torch.ones(2, 8), lambda y: y.square().sum()\n"
    )
    found = probe("own_model:make", batches=(1, 2), bits=(4,), precisions=("bf16",), damage=True)
    assert found.profile is not None
    model = found.profile.models["own_model:make"]
    assert set(model.workloads) == {"cpu"}
    assert model.indicator == "variance"
    assert list(model.damages) == ["0"]
    assert model.damages["0"]["bf16"] >= 0
    assert not dist.is_initialized()
    save_cluster(found, tmp_path / "one.json")
    (name,) = found.devices
    assert list(found.profile.devices[name].batches.values()) == [(1, 2)]
    assert merge_files([tmp_path / "one.json"] * 2) == load_cluster(tmp_path / "one.json")
    with pytest.raises(TrimtabError, match="two sizes are needed"):
        probe("own_model:make", batches=(2,))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nothing", "there is no model 'nothing'; choose gpt"),
        ("no_such_module:make", "there is no module 'no_such_module'"),
        ("math:make", "module math has no 'make'"),
        ("os:getcwd", r"must return \(model, batch\)"),
    ],
)
def test_a_model_that_is_none_is_named(text: str, words: str) -> None:
    with pytest.raises(TrimtabError, match=words):
        load_model(text, CPU)
