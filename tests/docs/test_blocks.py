"""Every code block of README.md and docs/ runs, or says why not; every command in them exists, with its flags."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.docs.code_blocks import OTHER, PAGES, ROOT, SHELL, CodeBlock, commands, read_page

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.pool import Pool

BLOCKS = {path: read_page(path) for path in PAGES}
SESSIONS = sorted({(path, block.session) for path, page in BLOCKS.items() for block in page.python()})
SHELL_BLOCKS = [block for page in BLOCKS.values() for block in page.shell()]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_every_block_names_its_language_and_every_exception_its_reason(path: Path) -> None:
    for block in BLOCKS[path].blocks:
        assert block.language in ("python", *SHELL, *OTHER), f"{block.place}: language {block.language!r}"
        assert block.not_run is None or len(block.not_run) > 5, f"{block.place}: not run, with no reason"


def run_session(sources: list[tuple[str, int, str]], folder: Path) -> None:
    """What a reader does who types a page's blocks in order. Errors name the page and the line in it."""
    scope: dict[str, Any] = {"__name__": "__main__"}
    before = Path.cwd()
    os.chdir(folder)
    try:
        for file, line, text in sources:
            exec(compile("\n" * (line - 1) + text, file, "exec"), scope)
    finally:
        os.chdir(before)


@pytest.mark.parametrize(("path", "session"), SESSIONS, ids=[f"{name(p)}-{s}" for p, s in SESSIONS])
def test_python_blocks_run_in_the_order_of_the_page(
    path: Path, session: int, ranks: Pool, tmp_path: Path
) -> None:
    from trimtab.precision.devices import cpu_precisions

    page = BLOCKS[path]
    if (precision := page.needs.get(session, "fp32")) not in cpu_precisions():
        pytest.skip(f"needs {precision}, which this processor does not offer")
    sources = [(str(b.page), b.line, b.text) for b in page.python() if b.session == session]
    ranks(page.ranks, run_session, sources, tmp_path, timeout=110.0, allow_groups=True)


@pytest.mark.parametrize("block", SHELL_BLOCKS, ids=lambda block: block.place)
def test_commands_exist_with_their_flags(block: CodeBlock) -> None:
    for line in commands(block):
        check_command(line, block)


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_commands_in_tables_exist_with_their_flags(path: Path) -> None:
    for line in re.findall(r"`(trimtab bench [a-z]+(?: --?[^`]+)?)`", path.read_text()):
        check_command(line, CodeBlock(page=path, line=0, language="bash", text=line))


@contextlib.contextmanager
def working_directory(folder: str) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def check_command(line: str, block: CodeBlock) -> None:
    words = [word for word in shlex.split(line) if not re.fullmatch(r"[A-Z_]+=\S*", word)]
    if words[0] == "torchrun" and "trimtab.cli" in words:
        words = ["trimtab", *words[words.index("trimtab.cli") + 1 :]]
    if words[:2] == ["trimtab", "run"]:
        from trimtab.cli.run import torchrun_command

        flags = [word for word in words[2:] if not word.startswith("--plan=")]
        if "--plan" in flags:  # it would be read
            place = flags.index("--plan")
            flags[place : place + 2] = []
        with tempfile.TemporaryDirectory() as folder, working_directory(folder):
            for word in flags:
                if word.endswith(".py"):
                    Path(folder, Path(word).name).touch()
            torchrun_command([Path(word).name if word.endswith(".py") else word for word in flags])
    elif words[0] == "trimtab":
        parse(words[1:], block)
    elif words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert words[1] in targets, f"{block.place}: make has no target {words[1]}"
    elif words[0] in ("python", "torchrun"):
        for script in (word for word in words if word.startswith(("examples/", "benchmarks/", "tools/"))):
            assert (ROOT / script).exists(), f"{block.place}: there is no {script}"
    else:
        assert words[0] in ("pip", "git", "cd"), f"{block.place}: {words[0]}: not a command this test knows"


def parse(words: list[str], block: CodeBlock) -> None:
    """Parse as the command line does, and run nothing."""
    import typer

    from trimtab.cli.app import app

    command: Any = typer.main.get_command(app)
    for word in list(words):
        if word.startswith("-") or not hasattr(command, "commands"):
            break
        assert word in command.commands, f"{block.place}: there is no command {word!r}"
        command = command.commands[words.pop(0)]
    if words == ["--help"] or words == ["--version"]:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.cuda.is_available", lambda: True)  # commands for a GPU are parsed here too
        command.make_context(command.name, words)  # raises for an option that does not exist
    for word in words:
        if word.startswith("examples/"):
            assert (ROOT / word).exists(), f"{block.place}: there is no {word}"


@pytest.mark.parametrize(
    "path", [p for p, page in BLOCKS.items() if any(b.run for b in page.blocks)], ids=name
)
def test_cheap_commands_run(path: Path, tmp_path: Path) -> None:
    """In the order of the page, in a folder that has the page's files, made by its setups and Python blocks."""
    wrapper = tmp_path / "bin" / "trimtab"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m trimtab.cli "$@"\n')
    wrapper.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{wrapper.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    session = next(b.session for b in BLOCKS[path].blocks if b.run)
    for block in (b for b in BLOCKS[path].blocks if b.session == session):
        if block.language == "python" and block.not_run is None:
            run_session([(block.place, block.line, block.text)], tmp_path)
        for line in commands(block) if block.run else ():
            done = subprocess.run(
                ["sh", "-c", line], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=130
            )
            assert done.returncode == 0, f"{block.place}: {line}\n{done.stdout}\n{done.stderr}"
