"""torch's own distributed test cases pass on the backend "trimtab" as they do on Gloo."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from tests.doors.torch_cases import run_cases

from trimtab.codec import Block

if TYPE_CHECKING:
    from tests.support.pool import Pool

NOT_APPLICABLE = {
    "*cuda*": "needs a GPU",
    "*nccl*": "needs a GPU",
    "*gpu*": "needs a GPU",
    "*GPU*": "needs a GPU",
    "*SyncBatchNorm*": "needs a GPU or torchvision",
    "*sync_bn*": "needs a GPU",
    "test_accumulate_gradients_no_sync*": "builds its model for the names gloo, nccl and mpi only",
    "test_all_to_all*": "Gloo's all_to_all takes lists of equal sizes only; the single form is run below",
    "test_monitored_barrier*": "torch refuses it by the backend's name; group.monitored_barrier() works",
    "test_batch_isend_irecv_mixed_backend_err": "needs NCCL",
    "test_batch_isend_irecv_op_err": "needs a GPU",
    "test_barrier_timeout_*": "re-initializes the group by a file of torch's own launcher",
    "test_get_rank": "counts files of torch's own launcher",
    "test_new_subgroups*": "needs four ranks or more",
    "test_ddp_*_err*": "reads what DDP says of the name gloo",
    "test_ddp_hook_with_optimizer_parity*": "compares to exact gradients, on several GPUs",
    "test_*localSGD*": "needs a GPU",
    "test_*averager*": "needs a GPU",
}
EXCLUDED = list(NOT_APPLICABLE)
EQUAL_SPLITS = ["test_all_to_all_single*"]


def check(results: list[dict[str, tuple[str, str]]], at_least: int) -> None:
    for name in results[0]:
        for rank, outcomes in enumerate(results):
            assert outcomes[name][0] != "failed", f"{name} on rank {rank}: {outcomes[name][1]}"
    counts = Counter(
        reason if what == "skipped" else what for what, reason in (o for o in results[0].values())
    )
    print(dict(counts))
    assert counts["passed"] >= at_least, counts


@pytest.mark.parametrize(
    ("patterns", "excluded", "at_least"),
    [(["test_*"], EXCLUDED, 80), (EQUAL_SPLITS, ["*cuda*"], 6)],
    ids=["all", "all-to-all"],
)
def test_cases_on_a_compressing_default_group(
    ranks: Pool, patterns: list[str], excluded: list[str], at_least: int
) -> None:
    options: dict[str, Any] = {"codec": Block(bits=4)}
    check(ranks(3, run_cases, patterns, excluded, options, {}, timeout=100, allow_groups=True), at_least)


def test_sums_with_every_size_compressed(ranks: Pool) -> None:
    """The cases add constants, which blocks carry exactly: the sums must be right to the last bit."""
    options = {"codec": Block(bits=8), "min_numel": 1}
    patterns = [
        "test_all_reduce_*sum*",
        "test_all_reduce_*coalesced*",
        "test_get_future",
        "test_ddp_create_graph",
    ]
    check(ranks(3, run_cases, patterns, EXCLUDED, options, {}, timeout=100, allow_groups=True), 10)


def test_groups_of_some_ranks(ranks: Pool) -> None:
    """Cases on a group of ranks 1 and 2, which torch runs from eight ranks on only; three are enough for them."""
    environment = {"WORLD_SIZE": "8"}
    patterns = ["test_*_group", "test_*_group_sum", "test_*_group_max"]
    excluded = [*EXCLUDED, "*full_group*", "test_destroy_group", "test_ddp*"]
    options: dict[str, Any] = {"codec": Block(bits=4), "min_numel": 1}
    check(ranks(3, run_cases, patterns, excluded, options, environment, timeout=100, allow_groups=True), 10)
