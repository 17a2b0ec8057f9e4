from __future__ import annotations

import pytest

from trimtab.cluster import Cluster, Device, Host
from trimtab.emulate import Emulation
from trimtab.emulate.mps import PARTS, Share, _parts, client_environment, share_out
from trimtab.emulate.placement import nodes, place_ranks
from trimtab.errors import TrimtabError


def _cards(memory_gib: float | None = None) -> Cluster:
    """A host with a full and a slow card, and one with a full card."""
    return Cluster(
        version=1,
        devices={
            "full": Device(kind="cuda", speed=1.0, memory_gib=memory_gib),
            "slow": Device(kind="cuda", speed=0.5, memory_gib=memory_gib),
        },
        hosts=(Host(name="a", devices={"full": 1, "slow": 1}), Host(name="b", devices={"full": 1})),
    )


def test_one_gpu_is_shared_out_by_speed() -> None:
    shares = share_out(place_ranks(_cards(memory_gib=20.0), [0, 1, 2]), [("gpu", 80.0)])
    assert [shares[rank].percentage for rank in range(3)] == pytest.approx([26.2, 14.0, 26.2], abs=2)
    assert [shares[rank].memory_fraction for rank in range(3)] == [0.25] * 3


def test_speeds_keep_their_proportion_over_several_gpus() -> None:
    shares = share_out(place_ranks(_cards(), [0, 1, 2]), [("x", 80.0), ("y", 80.0)])
    assert [shares[rank].gpu for rank in range(3)] == ["x", "y", "x"]
    assert [shares[rank].percentage for rank in range(3)] == pytest.approx([50.4, 26.2, 50.4], abs=0.1)


@pytest.mark.parametrize(
    "speeds", [[1.0], [1.0, 1.0], [0.7, 0.3], [1.0, 0.5], [1.0, 0.25], [1.0, 0.75], [1.0] * 4]
)
def test_parts_are_near_the_speeds_and_fit_one_gpu(speeds: list[float]) -> None:
    parts = _parts(speeds, [0] * len(speeds))
    assert sum(parts) <= 1
    assert set(parts) <= set(PARTS)
    assert [part / max(parts) for part in parts] == pytest.approx(
        [speed / max(speeds) for speed in speeds], rel=0.07
    )


def test_more_ranks_than_a_gpu_has_parts_for_are_refused() -> None:
    with pytest.raises(TrimtabError, match="do not fit"):
        _parts([1.0] * 10, [0] * 10)


def test_refuses_more_memory_than_there_is() -> None:
    with pytest.raises(TrimtabError, match=r"GPU gpu need 60 GiB and it has 40\.0"):
        share_out(place_ranks(_cards(memory_gib=20.0), [0, 1, 2]), [("gpu", 40.0)])


def test_each_rank_of_a_shared_gpu_is_a_node() -> None:
    result = nodes(place_ranks(_cards(), [0, 1, 2]))
    assert [(node[0].host, len(node)) for node in result] == [("a", 1), ("a", 1), ("b", 1)]


def test_without_a_gpu_what_is_needed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with (
        pytest.raises(TrimtabError, match="needs an NVIDIA GPU and the program `nvidia-smi`"),
        Emulation(_cards()),
    ):
        pass


def test_a_rank_has_the_work_queues_of_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    share = Share(gpu="gpu", percentage=50.0, memory_fraction=None)
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    assert client_environment(share, 0, "lo")["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert client_environment(share, 0, "lo")["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
