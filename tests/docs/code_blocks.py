"""The code blocks of README.md and docs/, and the notes in HTML comments that say how a test runs them.

A page is read from top to bottom, so its Python blocks run in that order and share their variables. Notes, which
a rendered page does not show, stand on lines of their own:

    <!-- not run: REASON -->     the next block is not run
    <!-- run -->                 the next shell block is run, each line, in the page's folder
    <!-- ranks: 2 -->            the page's Python runs on so many ranks
    <!-- session -->             what follows starts with no variables, in a new folder
    <!-- needs: int8 -->         the session is skipped where the processor does not offer this precision
    <!-- setup                   hidden Python, run where it stands
    code
    -->
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]
SHELL = ("bash", "console")
OTHER = ("diff", "yaml", "text", "mermaid")

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\S*)")
_NOTE = re.compile(
    r"^ *<!-- (?P<note>not run|run|ranks|session|needs|setup)\b:? ?(?P<text>.*?)(?P<end> ?-->)?$"
)


@dataclass(frozen=True, kw_only=True)
class CodeBlock:
    """One fenced block, or one hidden setup."""

    page: Path
    line: int
    """Of its first line of code, counted from 1."""
    language: str
    text: str
    not_run: str | None = None
    run: bool = False
    session: int = 0

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@dataclass
class Page:
    """A page's blocks in order."""

    path: Path
    ranks: int = 1
    blocks: list[CodeBlock] = field(default_factory=list)
    needs: dict[int, str] = field(default_factory=dict)
    """The precision without which a session cannot run."""

    def python(self) -> list[CodeBlock]:
        return [block for block in self.blocks if block.language == "python" and block.not_run is None]

    def shell(self) -> list[CodeBlock]:
        return [block for block in self.blocks if block.language in SHELL]


def read_page(path: Path) -> Page:
    """All blocks of a page; raises ValueError for a block that is not closed."""
    page = Page(path)
    lines = path.read_text().splitlines()
    notes: dict[str, str] = {}
    session = 0
    number = 0
    while number < len(lines):
        line = lines[number]
        number += 1
        if fence := _FENCE.match(line):
            text, number = _until(lines, number, fence["indent"] + "```", path)
            block = CodeBlock(
                page=path,
                line=number - text.count("\n") - 1,
                language=fence["language"],
                text=_dedent(text, len(fence["indent"])),
                not_run=notes.get("not run"),
                run="run" in notes,
                session=session,
            )
            page.blocks.append(block)
            notes = {}
        elif note := _NOTE.match(line):
            if note["note"] == "setup":
                text, number = _until(lines, number, "-->", path)
                start = number - text.count("\n") - 1
                page.blocks.append(
                    CodeBlock(page=path, line=start, language="python", text=text, session=session)
                )
            elif note["note"] == "session":
                session += 1
            elif note["note"] == "needs":
                page.needs[session] = note["text"]
            elif note["note"] == "ranks":
                page.ranks = int(note["text"])
            else:
                notes[note["note"]] = note["text"]
    if notes:
        raise ValueError(f"{path}: a note with no block after it: {notes}")
    return page


def _until(lines: list[str], number: int, end: str, path: Path) -> tuple[str, int]:
    for last in range(number, len(lines)):
        if lines[last].rstrip() == end:
            return "".join(f"{line}\n" for line in lines[number:last]), last + 1
    raise ValueError(f"{path}:{number}: no {end!r} closes what begins here")


def _dedent(text: str, indent: int) -> str:
    return "".join(line[indent:] if line.strip() else "\n" for line in text.splitlines(keepends=True))


def commands(block: CodeBlock) -> list[str]:
    """The commands of a shell block: prompts and comments removed, continued lines joined."""
    joined = block.text.replace("\\\n", " ")
    stripped = (re.sub(r"(^|\s)#.*", "", line).removeprefix("$ ").strip() for line in joined.splitlines())
    return [line for line in stripped if line]
