"""What `trimtab run` shows of the job beside the script's own output, and where its events go."""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from trimtab import environment
from trimtab.cluster import cluster_tree
from trimtab.errors import TrimtabError
from trimtab.report.events import yield_to_training
from trimtab.report.known_cluster import known_cluster
from trimtab.report.live import LiveRun, frame_lines, status_line
from trimtab.report.panel import Panel, suits_a_panel
from trimtab.report.run_folder import load_run
from trimtab.report.run_info import RUNS, add_run_info, new_run_folder, run_name, write_run_info
from trimtab.report.summary import summary_lines

REFRESH_S, LINE_EVERY_S = 2.0, 60.0
"""Seconds between two frames of the live view, and between two lines where there is no terminal."""

OPTIONS: dict[str, dict[str, Any]] = {
    "--run-dir": {
        "metavar": "DIR",
        "help": f"The run folder, for the job's events; by default {RUNS}/TIME-SCRIPT (TRIMTAB_RUN_DIR).",
    },
    "--no-run-dir": {"action": "store_true", "help": "Write no events; then there is no live view either."},
    "--quiet": {"action": "store_true", "help": "Show neither the live view nor the summary at the end."},
}


class RunView:
    """The run folder of a job that is being launched, and who looks at it."""

    def __init__(self, parsed: argparse.Namespace, arguments: Sequence[str]) -> None:
        """Makes the folder; one that cannot be made costs a warning."""
        if parsed.run_dir is not None and parsed.no_run_dir:
            raise TrimtabError("run: --run-dir and --no-run-dir exclude each other")
        self._quiet = bool(parsed.quiet)
        self.folder = None if parsed.no_run_dir or environment.disabled() else _folder(parsed)
        if self.folder is None:
            return
        try:
            write_run_info(
                self.folder,
                command=["trimtab", "run", *arguments],
                script=parsed.training_script,
                world_size=_world_size(parsed),
                plan=getattr(parsed, "plan", None),
                cluster=None,
            )
        except OSError as error:
            environment.logger().warning(
                "no events are written: %s cannot be made: %s", self.folder, error.strerror or error
            )
            self.folder = None

    def environment(self) -> dict[str, str]:
        """Variables of the ranks."""
        return {environment.RUN_DIR: "" if self.folder is None else str(self.folder)}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Show the job while it runs: a panel at the bottom of a terminal, a line a minute elsewhere."""
        if self.folder is None or self._quiet:
            yield
            return
        done = threading.Event()
        show = self._show_panel if suits_a_panel(sys.stderr, sys.stdout) else self._print_lines
        live = LiveRun(self.folder)

        def watch() -> None:
            yield_to_training()
            show(live, done)

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def summarize(self) -> None:
        """Record the cluster as the ranks saw it, and print what the job did, if it took steps and rank 0 ran here."""
        if self.folder is None or not (self.folder / "rank-0.jsonl").exists():
            return
        run = load_run(self.folder)
        cluster = known_cluster(run)
        if cluster is not None and run.info.get("cluster") is None:
            with suppress(OSError, ValueError, TrimtabError):  # the page does without
                add_run_info(self.folder, cluster=cluster_tree(cluster))
        lines = [] if self._quiet else summary_lines(run)
        for line in lines:
            print(f"trimtab: {line}", file=sys.stderr)
        if lines:
            shown = os.path.relpath(self.folder)
            print(f"trimtab: more: trimtab report {shown}", file=sys.stderr)

    @staticmethod
    def _show_panel(live: LiveRun, done: threading.Event) -> None:
        panel = Panel(sys.stderr)
        try:
            while not done.wait(REFRESH_S):
                run = live.poll()
                if run.ranks:
                    panel.draw(frame_lines(run, panel.columns, color=True))
        except Exception as error:  # a view is no reason to end a training
            environment.logger().debug("the live view ends: %r", error)
        finally:
            panel.close()

    @staticmethod
    def _print_lines(live: LiveRun, done: threading.Event) -> None:
        began = time.monotonic()
        while not done.wait(LINE_EVERY_S):
            run = live.poll()
            if any(run.steps.values()):
                minutes = (time.monotonic() - began) / 60
                print(f"trimtab: {minutes:.0f} min: {status_line(run)}", file=sys.stderr, flush=True)


def _folder(parsed: argparse.Namespace) -> Path:
    chosen = parsed.run_dir or os.environ.get(environment.RUN_DIR)
    if chosen:
        return Path(chosen).absolute()
    if parsed.nnodes not in ("1", "1:1") and parsed.rdzv_id not in (None, "", "none"):
        # The same on all nodes, which may share the file system.
        return Path.cwd() / RUNS / run_name(parsed.training_script, str(parsed.rdzv_id))
    return new_run_folder(parsed.training_script)


def _world_size(parsed: argparse.Namespace) -> int | None:
    fewest, _, most = str(parsed.nnodes).partition(":")
    known = str(parsed.nproc_per_node).isdigit() and fewest.isdigit() and fewest == (most or fewest)
    return int(parsed.nproc_per_node) * int(fewest) if known else None
