"""Start an uneven cluster on this machine, and run torchrun jobs on it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from trimtab.cluster import Cluster
from trimtab.emulate import links, mps
from trimtab.emulate.agents import free_port, require_free, require_script, stop, wait
from trimtab.emulate.cleanup import kill_marked, remove, sweep
from trimtab.emulate.guardian import Guardian
from trimtab.emulate.job_directory import EMULATION_RUN, Job, create_job
from trimtab.emulate.outcome import Failure, Outcome, first_failure, node_folder
from trimtab.emulate.placement import Placement, nodes, place_ranks
from trimtab.emulate.rank_output import RankOutput
from trimtab.emulate.throttling.cgroups import Group, kills, limit_memory
from trimtab.emulate.throttling.duty_cycle import start_duty_cycle
from trimtab.emulate.throttling.rank_state import RankSettings, RankState, state_path
from trimtab.emulate.throttling.schedule import Contention, check_schedule, speed_left
from trimtab.emulate.throttling.throttle import Throttle, check_throttle
from trimtab.environment import EMULATED_HOST, RUN_FOLDER, logger
from trimtab.errors import TrimtabError

_NAMESPACE_PORT = 29500  # always free in a network namespace of our own


class Emulation:
    """An uneven cluster on this machine, for as long as the `with` block lasts.

    Hosts are set up on entry: network namespaces and links if any host has a link, memory limits, and what the
    throttle needs. Everything is removed on exit, on any error, and if this process dies.

    Args:
        cluster: the cluster to emulate. Speeds are relative to the fastest device class of the same kind.
        throttle: how CPU ranks are slowed down: `quota`, `duty`, `competitor`, `gemm`, or
            `auto` for quota where control groups are available and duty cycle elsewhere.
        schedule: contention of hosts by optimizer step.
        port: port of torchrun's rendezvous; a free one if None.

    Raises:
        TrimtabError: on entry, if this machine cannot emulate the cluster; no process of the job has started then.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        throttle: str = "auto",
        schedule: Sequence[Contention] = (),
        port: int | None = None,
    ) -> None:
        self.cluster = cluster
        self._placements = place_ranks(cluster, sorted(os.sched_getaffinity(0)))
        self._nodes = nodes(self._placements)
        self._throttle_option = throttle
        self._schedule = tuple(schedule)
        self._port = port
        self._runs = 0
        self._job: Job | None = None
        self._guardian: Guardian | None = None
        self._links: links.Links | None = None
        self._shares: dict[int, mps.Share] = {}
        self._mps: dict[str, str] = {}
        self._memory: dict[int, Group] = {}
        check_schedule(self._schedule, cluster)
        check_throttle(throttle, self._placements, self._schedule)

    def __enter__(self) -> Emulation:
        for name in sweep():
            logger().info("removed the leftovers of emulation %s, which was killed", name)
        if links.needs_links(self.cluster):
            links.require()
        elif self._port is not None:
            require_free(self._port)
        if any(placement.kind == "cuda" for placement in self._placements):
            mps.require()
            self._shares = mps.share_out(self._placements, mps.visible_gpus())
        self._job = create_job()
        try:
            self._guardian = Guardian(self._job)
            self._memory = {
                placement.rank: limit_memory(self._job, placement)
                for placement in self._placements
                if placement.kind == "cpu" and placement.memory_gib is not None
            }
            self._throttle = Throttle(self._job, self._throttle_option, self._placements, self._schedule)
            if links.needs_links(self.cluster):
                self._links = links.Links(self._job, self.cluster)
            if any(share.percentage < 100 for share in self._shares.values()):
                self._mps = mps.start(self._job)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove everything; a second call does nothing."""
        job, self._job = self._job, None
        if job is None:
            return
        remove(job.path)
        os.close(job.lock)
        if self._guardian is not None:
            self._guardian.dismiss()

    @property
    def throttle(self) -> str | None:
        """The mechanism that slows down CPU ranks; None if all run at full speed."""
        return self._throttle.name

    @property
    def network(self) -> links.Links | None:
        """The hosts' links, to cut or slow down while a job runs; None if no host has one."""
        return self._links

    def address(self, host: str) -> str:
        """The address of a host for the other hosts of the emulation."""
        return "127.0.0.1" if self._links is None else self._links.address(host)

    def start(
        self, host: str, argv: Sequence[str], *, env: Mapping[str, str] | None = None, **popen: Any
    ) -> subprocess.Popen[Any]:
        """Start any program on a host, behind its link; it is killed when the emulation ends.

        Speed and memory limits apply to ranks only, not to this program.
        """
        job = self._live_job()
        if host not in {name for name, _ in self.cluster.machines()}:
            raise TrimtabError(f"emulate: there is no host {host!r} in this cluster")
        inside = list(argv) if self._links is None else self._links.inside(host, argv)
        return subprocess.Popen(inside, env={**os.environ, **(env or {}), **job.marked}, **popen)

    def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        capture: bool = False,
        timeout: float | None = None,
    ) -> Outcome:
        """Run a script on every rank under torchrun and wait for it.

        Args:
            argv: the script and its arguments, or `-m`, a module and its arguments.
            env: environment variables to add.
            capture: return rank 0's standard output in the outcome instead of printing it.
            timeout: seconds after which the run is stopped.

        Raises:
            TrimtabError: the script does not exist.
            TimeoutError: the run took longer than `timeout`.
            BrokenPipeError: the output of this process was closed during the run.
        """
        job = self._live_job()
        require_script(argv)
        self._runs += 1
        run = job.path / f"run-{self._runs}"
        run.mkdir()
        killed = {rank: kills(group) for rank, group in self._memory.items()}
        states = [self._prepare(run, placement) for placement in self._placements]
        output = RankOutput(run, self._placements, capture=capture)
        agents: list[subprocess.Popen[Any]] = []
        duty: subprocess.Popen[bytes] | None = None
        captured = ""
        try:
            port = self._port or (_NAMESPACE_PORT if self._links else free_port())
            for index, node in enumerate(self._nodes):
                agents.append(self._start_agent(run, index, node, port, argv, env or {}))
            if self.throttle == "duty":
                slowed = [(state_path(run, s.rank), s) for s in self._placements if self._throttle.slows(s)]
                duty = start_duty_cycle(slowed, {**os.environ, **job.marked, EMULATION_RUN: str(run)})
            wait(agents, run, output, timeout)
        finally:
            stop(agents)
            kill_marked(run, EMULATION_RUN)
            for process in [*agents, *([] if duty is None else [duty])]:
                process.wait()
            captured = output.finish()
        if output.broken:
            raise BrokenPipeError("emulate: the output was closed, so the run was stopped")
        failure = self._failure(run, agents, killed)
        steps = tuple(state.steps for state in states)
        if failure is None and self._schedule and not any(steps):
            logger().warning("the schedule had no effect: no rank took a step with a torch optimizer")
        shutil.rmtree(run, ignore_errors=True)
        status = 0 if failure is None else failure.status if failure.status > 0 else 128 - failure.status
        return Outcome(status=status, failure=failure, stdout=captured, steps=steps)

    def _live_job(self) -> Job:
        if self._job is None:
            raise TrimtabError("emulate: the emulation is not running; use it inside its `with` block")
        return self._job

    def _prepare(self, run: Path, placement: Placement) -> RankState:
        """Write the settings and the initial state of one rank in a run."""
        schedule = tuple(c for c in self._schedule if c.host == placement.host)
        share = self._shares.get(placement.rank)
        # The speed of a GPU is its share; the throttle only adds contention.
        speed = placement.speed if share is None else 1.0
        RankSettings(
            device=placement.device,
            kind=placement.kind,
            cores=placement.cores,
            sharing=placement.sharing,
            speed=speed,
            throttle=self.throttle if self._throttle.slows(placement) else None,
            schedule=schedule,
            quota=self._throttle.groups.get(placement.rank),
            memory=self._memory.get(placement.rank),
            memory_fraction=None if share is None else share.memory_fraction,
        ).save(run, placement.rank)
        return RankState.create(state_path(run, placement.rank), speed * speed_left(schedule, 0))

    def _start_agent(
        self,
        run: Path,
        index: int,
        node: Sequence[Placement],
        port: int,
        argv: Sequence[str],
        env: Mapping[str, str],
    ) -> subprocess.Popen[Any]:
        interface = "lo" if self._links is None else links.INTERFACE
        variables = {
            "GLOO_SOCKET_IFNAME": interface,
            "NCCL_SOCKET_IFNAME": interface,
            "OMP_NUM_THREADS": str(len(node[0].cores)),
            EMULATED_HOST: node[0].host,
            # Otherwise torch warns at every connection that addresses in a namespace have no host name.
            "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
            **self._mps,
        }
        share = self._shares.get(node[0].rank)
        if share is not None:
            variables.update(mps.client_environment(share, node[0].rank, interface))
        torchrun = [
            f"--nnodes={len(self._nodes)}",
            f"--node-rank={index}",
            f"--nproc-per-node={len(node)}",
            f"--master-addr={self.address(self._nodes[0][0].host)}",
            f"--master-port={port}",
            "--module",
            "trimtab.emulate.worker",
        ]
        node_folder(run, index).mkdir()
        variables[RUN_FOLDER] = str(node_folder(run, index))
        with (run / f"agent-{index}.log").open("wb") as log:
            return self.start(
                node[0].host,
                [sys.executable, "-m", "trimtab.emulate.agents", str(index), *torchrun, *argv],
                env={**variables, **env, EMULATION_RUN: str(run)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _failure(
        self, run: Path, agents: Sequence[subprocess.Popen[Any]], killed: Mapping[int, int]
    ) -> Failure | None:
        if all(agent.returncode == 0 for agent in agents):
            return None
        failure = first_failure(run, self._placements)
        if failure is None:
            logs = [run / f"agent-{i}.log" for i, agent in enumerate(agents) if agent.returncode != 0]
            return Failure(rank=None, host=None, status=1, text=logs[0].read_text(errors="replace"))
        rank = failure.rank
        if rank is not None and rank in killed and kills(self._memory[rank]) > killed[rank]:
            placement = self._placements[rank]
            text = f"killed for using more than the {placement.memory_gib:g} GiB of device class {placement.device!r}"
            return Failure(rank=placement.rank, host=placement.host, status=failure.status, text=text)
        return failure


def emulate(
    cluster: Cluster,
    argv: Sequence[str],
    *,
    throttle: str = "auto",
    schedule: Sequence[Contention] = (),
    port: int | None = None,
    env: Mapping[str, str] | None = None,
) -> int:
    """Run a script on an emulated cluster, as `trimtab emulate` does; returns the exit status.

    The traceback of the failing rank is printed to standard error. SIGTERM and SIGHUP stop the run as Ctrl-C does:
    everything is removed before this process exits.
    """
    try:
        with (
            _signals_raised(),
            Emulation(cluster, throttle=throttle, schedule=schedule, port=port) as emulation,
        ):
            outcome = emulation.run(argv, env=env)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    if outcome.failure is not None:
        logger().error("%s", outcome.failure)
    return outcome.status


@contextmanager
def _signals_raised() -> Iterator[None]:
    """Turn termination signals into an exception, if this is the main thread."""

    def exit_(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    previous = {}
    with suppress(ValueError):  # not in the main thread, where the guardian cleans up after a signal
        previous = {number: signal.signal(number, exit_) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
