"""Links: a network namespace for each host, joined by a bridge, each end under a token bucket.

The bridge has a namespace of its own and interfaces are made inside the namespaces, so
the machine's own network is never touched and jobs cannot meet: all use the same
private addresses, each behind its own walls.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

from trimtab.errors import TrimtabError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trimtab.cluster import Cluster, Link
    from trimtab.emulate.job_directory import Job

INTERFACE = "eth0"
"""Name of the interface in each host's namespace."""

_BURST_S = 0.002
_MIN_BURST_BYTES = 16 * 1024
_QUEUE_MS = 50
_UNSHAPED = "remove `link` from the hosts to run without shaped links"


def wanted(cluster: Cluster) -> bool:
    """Whether any host asks for a link."""
    return any(host.link is not None for host in cluster.hosts)


def require() -> None:
    """Refuse if links cannot be shaped here, saying what is missing."""
    if os.geteuid() != 0:
        raise TrimtabError(f"emulate: links need root (network namespaces): run as root, or {_UNSHAPED}")
    for tool, package in (("ip", "iproute2"), ("tc", "iproute2"), ("nsenter", "util-linux")):
        if shutil.which(tool) is None:
            raise TrimtabError(f"emulate: links need the program `{tool}`: install {package}, or {_UNSHAPED}")


class Links:
    """The namespaces of one job, brought up; the job's removal takes them down."""

    def __init__(self, job: Job, cluster: Cluster) -> None:
        self._job = job
        self._namespaces: dict[str, str] = {}
        self._addresses: dict[str, str] = {}
        switch = f"trimtab-{job.name}-switch"
        self._make_namespace(switch)
        self._run("link", "add", "bridge", "type", "bridge", namespace=switch)
        self._run("link", "set", "bridge", "up", namespace=switch)
        for index, (name, host) in enumerate(cluster.machines()):
            namespace, port = f"trimtab-{job.name}-{index}", f"port{index}"
            self._namespaces[name] = namespace
            self._addresses[name] = f"10.83.{(index + 1) // 256}.{(index + 1) % 256}"
            self._make_namespace(namespace)
            self._run(
                "link",
                "add",
                INTERFACE,
                "netns",
                namespace,
                "type",
                "veth",
                "peer",
                "name",
                port,
                "netns",
                switch,
            )
            self._run("addr", "add", f"{self._addresses[name]}/16", "dev", INTERFACE, namespace=namespace)
            self._run("link", "set", "lo", "up", namespace=namespace)
            self._run("link", "set", INTERFACE, "up", namespace=namespace)
            self._run("link", "set", port, "master", "bridge", "up", namespace=switch)
            if host.link is not None:
                # A queue shapes what leaves: the host's end for sending, the bridge's for receiving.
                self._shape(cluster.links[host.link], INTERFACE, namespace)
                self._shape(cluster.links[host.link], port, switch)

    def address(self, host: str) -> str:
        """The host's address, reachable from the other hosts of the job only."""
        return self._addresses[host]

    def inside(self, host: str, argv: Sequence[str]) -> list[str]:
        """The command that runs `argv` on the host."""
        # Not `ip netns exec`: it mounts /sys anew, which hides the control groups.
        return ["nsenter", f"--net=/run/netns/{self._namespaces[host]}", "--", *argv]

    def _make_namespace(self, name: str) -> None:
        self._job.record("netns", name)
        self._run("netns", "add", name, hint="needs the capabilities SYS_ADMIN and NET_ADMIN")

    def _shape(self, link: Link, device: str, namespace: str) -> None:
        for arguments, module in queues(link):
            hint = f"this kernel needs the module sch_{module}"
            if module == "netem":
                hint += "; without it remove latency_us from the links"
            self._run("qdisc", "add", "dev", device, *arguments, tool="tc", namespace=namespace, hint=hint)

    def _run(self, *arguments: str, tool: str = "ip", namespace: str | None = None, hint: str = "") -> None:
        inside = [] if namespace is None else ["-n", namespace]
        done = subprocess.run(
            [tool, *inside, *arguments],
            capture_output=True,
            text=True,
            env={**os.environ, **self._job.marked},
            check=False,
        )
        if done.returncode != 0:
            said = " ".join(done.stderr.split())
            raise TrimtabError(
                f"emulate: links: `{tool} {' '.join(arguments)}` failed: {said}"
                + (f" ({hint})" if hint else "")
                + f"; or {_UNSHAPED}"
            )


def queues(link: Link) -> list[tuple[list[str], str]]:
    """Arguments of `tc qdisc add dev DEVICE` for one end of a link, with the kernel module each needs."""
    rate = link.gbit_per_s * 1e9
    # Large enough that timers do not cost bandwidth, small enough that short messages feel the rate.
    burst = max(_MIN_BURST_BYTES, int(rate / 8 * _BURST_S))
    token_bucket = ["tbf", "rate", f"{rate:.0f}bit", "burst", str(burst), "latency", f"{_QUEUE_MS}ms"]
    found = [(["root", "handle", "1:", *token_bucket], "tbf")]
    if link.latency_us:
        # A packet passes two shaped ends, its sender's and its receiver's: half the delay at each.
        delay = ["netem", "delay", f"{link.latency_us / 2:.1f}us", "limit", "100000"]
        found.append((["parent", "1:1", "handle", "10:", *delay], "netem"))
    return found
