"""`trimtab compare`: two settings side by side, and files that say what is wrong with them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.support.requirements import requires
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import trimtab
from trimtab.codec import Block, PowerSGD, TopK
from trimtab.errors import TrimtabError
from trimtab.runtime.compare import attach, compare
from trimtab.runtime.compare_settings import BlockCodec, Settings, load_settings
from trimtab.runtime.compress import adaptive_of, compression_of

if TYPE_CHECKING:
    from tests.support.pool import Pool

EXAMPLES = Path(__file__).parents[2] / "examples"


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trimtab.cli", "compare", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def test_side_by_side(tmp_path: Path) -> None:
    plain = written(tmp_path, "plain.yaml", "codec: none\nsteps: 6\n")
    bits = written(tmp_path, "bits.yaml", "codec: {kind: block, bits: 2, error_feedback: true}\nsteps: 6\n")
    done = command(plain, bits, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    summary, rows = result["summary"], result["rows"]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    # The same start on the same data: nothing was sent before the first loss.
    assert rows[0]["loss_a"] == rows[0]["loss_b"] > 5
    assert rows[-1]["loss_a"] < rows[0]["loss_a"]
    assert rows[-1]["loss_a"] != rows[-1]["loss_b"]
    assert summary["link"] == "unshaped"
    assert summary["a_explained"] == "plain DDP"
    assert "bits=2" in summary["b_explained"]
    assert rows[-1]["seconds_a"] > 0


@requires(root=True, tools=["ip", "tc"])
def test_a_link_is_shaped(tmp_path: Path) -> None:
    text = "codec: {}\nsteps: 4\nlink: 50mbit\n"
    plain = written(tmp_path, "a.yaml", text.format("none"))
    bits = written(tmp_path, "b.yaml", text.format("{kind: block}"))
    result = compare(plain, bits)
    # 1.1 MB at 50 Mbit/s: 0.18 s that no machine can do without.
    assert result.summary["link"] == "50mbit"
    assert float(result.summary["a_step_ms"]) > 150
    # The interface of a shaped link is the job's own; nobody else's bytes are counted.
    assert 1 / 8 < float(result.summary["b_bytes_over_a"]) < 1 / 6


def test_what_else_differs_is_refused(tmp_path: Path) -> None:
    one = written(tmp_path, "one.yaml", "codec: none\nseed: 1\n")
    two = written(tmp_path, "two.yaml", "codec: none\nseed: 2\n")
    with pytest.raises(TrimtabError, match=r"one\.yaml has seed 1 and .*two\.yaml 2"):
        compare(one, two)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("codec: none\nstesp: 5\n", "stesp: unknown key; did you mean steps?"),
        ("codec: none\nzzz: 5\n", "zzz: unknown key; known here: codec, model"),
        ("codec: {kind: block, bit: 4}\n", "codec.bit: unknown key; did you mean bits?"),
        ("codec: {kind: powersgd, bits: 4}\n", "codec.bits: unknown key; known here: kind, rank"),
        ("codec: {kind: block, bits: 9}\n", "codec.bits: should be less than or equal to 8, not 9"),
        ("codec: {kind: block, bits: '4'}\n", "codec.bits: should be a valid integer, not '4'"),
        ("codec: adaptiv\n", "codec.kind: there is no codec 'adaptiv'; did you mean adaptive?"),
        ("codec: {bits: 4}\n", "codec.kind: missing; write one of none, default, adaptive"),
        ("steps: 4\n", "codec: missing; add it"),
        ("codec: none\nmodel: bert\n", "model: should be 'gpt-small', 'gpt5m' or 'gpt25m', not 'bert'"),
        ("codec: none\nlink: fast\n", "link: 'fast' is no link rate"),
        ("codec: none\nworld: 1\n", "world: should be greater than or equal to 2, not 1"),
        ("codec: none\ncodec: none\n", "'codec' appears twice"),
        ("- codec\n", "holds ['codec'] where a mapping"),
        ("codec: [\n", "not valid YAML"),
    ],
)
def test_mistakes_are_named_with_the_remedy(tmp_path: Path, text: str, said: str) -> None:
    path = written(tmp_path, "s.yaml", text)
    with pytest.raises(TrimtabError) as caught:
        load_settings(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert said in str(caught.value)


def test_mistakes_at_the_command_line_are_one_line(tmp_path: Path) -> None:
    done = command(tmp_path / "none.yaml", tmp_path / "none.yaml")
    assert done.returncode == 2
    assert (
        done.stderr
        == f"trimtab: {tmp_path}/none.yaml: cannot be read: No such file or directory; check the path\n"
    )


def test_the_examples_are_good_and_differ_in_their_codecs_only() -> None:
    files = sorted(EXAMPLES.glob("compare-*.yaml"))
    settings = [load_settings(path) for path in files]
    assert len(settings) == 3
    assert (
        len(
            {one.model_copy(update={"codec": BlockCodec(kind="block")}).model_dump_json() for one in settings}
        )
        == 1
    )
    assert len({one.codec.kind for one in settings}) == 3


def attached() -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    for codec in (
        {"kind": "none"},
        {"kind": "block", "bits": 3, "block": 256, "stochastic": False, "error_feedback": True},
        {"kind": "powersgd", "rank": 2},
        {"kind": "topk", "density": 0.1, "error_feedback": False},
        {"kind": "adaptive", "family": "bits-feedback", "warmup": 3},
    ):
        ddp = DistributedDataParallel(nn.Linear(64, 64))
        attach(ddp, Settings.model_validate({"codec": codec, "seed": 5}))
        compression = compression_of(ddp)
        if compression is None:
            found.append((None,))
            continue
        ddp(torch.randn(2, 64)).sum().backward()
        controller = adaptive_of(ddp)
        if controller is not None:
            controller.close()
        compression.close()
        found.append(
            (compression.codec, compression.memory is not None, compression.seed, controller is not None)
        )
    assert trimtab.explain(ddp)
    return found


def test_every_kind_of_codec_is_attached_as_written(ranks: Pool) -> None:
    outcome = ranks(2, attached, allow_groups=True)
    assert outcome[0] == outcome[1]
    nothing, block, low_rank, sparse, adaptive = outcome[0]
    assert nothing == (None,)
    assert block == (Block(bits=3, block=256, stochastic=False), True, 5, False)
    assert low_rank == (PowerSGD(rank=2), True, 5, False)
    assert sparse == (TopK(density=0.1), False, 5, False)
    assert adaptive[0].stochastic is False
    assert adaptive[1:] == (True, 5, True)
