"""The command line: help without torch, mistakes in one line, statuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import trimtab
from trimtab.cli import main


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trimtab", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_version() -> None:
    done = command("--version")
    assert (done.returncode, done.stdout) == (0, f"trimtab {trimtab.__version__}\n")


@pytest.mark.parametrize(
    "arguments", [(), ("bench",), ("--help",), ("emulate", "--help"), ("bench", "ddp", "--help")]
)
def test_help(arguments: tuple[str, ...]) -> None:
    done = command(*arguments)
    assert done.returncode == 0
    assert "Usage" in done.stdout
    assert done.stderr == ""


def test_a_missing_torch_is_named() -> None:
    hide = "import sys; sys.modules['torch'] = None; from trimtab.cli import main; main(['bench', 'codec'])"
    done = subprocess.run(
        [sys.executable, "-c", hide], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert done.stderr == "trimtab: the Python package 'torch' is missing; install it: pip install torch\n"


def test_mistakes_are_one_line_and_status_2(tmp_path: Path) -> None:
    cluster = tmp_path / "c.yaml"
    cluster.write_text(
        "version: 1\ndevices: {d: {kind: cpu, speed: 0}}\nhosts: [{name: a, devices: {d: 1}}]\n"
    )
    good = tmp_path / "good.yaml"
    good.write_text(cluster.read_text().replace("speed: 0", "speed: 1"))
    cases = {
        ("nonsense",): "No such command 'nonsense'",
        ("emulate", "none.yaml", "--", "x.py"): "none.yaml: cannot be read",
        ("emulate", str(cluster), "--", "x.py"): "devices.d.speed: should be greater than 0",
        ("emulate", str(good)): "no script; write: trimtab emulate",
        ("emulate", str(good), "--", str(tmp_path / "x.py")): "there is no script",
        ("emulate", str(good), "--throttle", "magic", "--", "x.py"): "magic",
        ("emulate", str(good), "--schedule", "soon", "--", "x.py"): "soon",
        ("run",): "no script",
    }
    for arguments, words in cases.items():
        done = command(*arguments)
        assert done.returncode == 2, (arguments, done.stderr)
        assert words in done.stderr
        assert done.stderr.startswith("trimtab: ")
        assert len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("emulate good.yaml --schedule z=0.5@1:2 -- x.py", "no host 'z' in this cluster; its hosts are a"),
        ("probe --device tpu", "--device 'tpu' is unknown; use cpu or cuda"),
        ("bench ddp --device tpu", "--device 'tpu' is unknown; use cpu or cuda"),
        ("probe --device cuda", "torch finds no CUDA device here; use --device cpu"),
        ("bench codec --device cuda", "torch finds no CUDA device here; use --device cpu"),
        (
            "probe --out none/c.json",
            "none/c.json: cannot be written: No such file or directory; check the folder",
        ),
        ("probe --out good.yaml/c.json", "good.yaml/c.json: cannot be written: Not a directory"),
        ("probe --out folder.json", "folder.json: cannot be written: it is a folder"),
        ("probe --out c.txt", "c.txt: a cluster file ends in .yaml, .yml or .json"),
        ("probe --out c.json", "cannot be created: Not a directory; set XDG_CACHE_HOME to a folder"),
        ("plan --cluster good.yaml --batch-size 8 --out none/p.json", "none/p.json: cannot be written"),
    ],
)
def test_refused_before_work_starts(
    arguments: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "x.py")  # a file, where a folder is needed
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    devices = "version: 1\ndevices: {d: {kind: cpu, speed: 1}}\nhosts: [{name: a, devices: {d: 1}}]\n"
    Path("good.yaml").write_text(devices)
    Path("x.py").write_text("")
    Path("folder.json").mkdir()
    with pytest.raises(SystemExit) as left:
        main(arguments.split())
    error = capsys.readouterr().err
    assert left.value.code == 2
    assert words in error
    assert error.startswith("trimtab: ")
    assert len(error.splitlines()) == 1
    assert sorted(path.name for path in Path().iterdir()) == ["folder.json", "good.yaml", "x.py"]
