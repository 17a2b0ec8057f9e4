"""Links: one network namespace per host, joined by a bridge, with a token bucket at each end.

The bridge has its own namespace and all interfaces are created inside namespaces. So the machine's network is never
changed, and jobs are isolated from each other although they use the same private addresses.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence

from trimtab.cluster import Cluster, Link
from trimtab.emulate.job_directory import Job
from trimtab.errors import TrimtabError

INTERFACE = "eth0"
"""Name of the interface in each host's namespace."""

_BURST_S = 0.002
_MIN_BURST_BYTES = 16 * 1024
_QUEUE_MS = 50
_CONGESTION = ("cubic", "reno")
"""How hosts' TCP connections avoid congestion, also where this machine is set to another: Linux's own default, or what
every Linux offers, where namespaces may not use that.

BBR sends next to nothing for 0.2 s whenever a connection's shortest round trip is ten seconds old. In a job that is 2 %
of the time, but of methods that take turns in a benchmark it hits every third or fourth step.
"""

_UNSHAPED = "remove `link` from the hosts to run without shaped links"


def needs_links(cluster: Cluster) -> bool:
    """Whether any host has a link."""
    return any(host.link is not None for host in cluster.hosts)


def require() -> None:
    """Raise if links cannot be shaped on this machine."""
    if os.geteuid() != 0:
        raise TrimtabError(f"emulate: links need root (network namespaces): run as root, or {_UNSHAPED}")
    for tool, package in (("ip", "iproute2"), ("tc", "iproute2"), ("nsenter", "util-linux")):
        if shutil.which(tool) is None:
            raise TrimtabError(f"emulate: links need the program `{tool}`: install {package}, or {_UNSHAPED}")


class Links:
    """The namespaces of one job; they are removed with the job."""

    def __init__(self, job: Job, cluster: Cluster) -> None:
        self._job = job
        self._namespaces: dict[str, str] = {}
        self._addresses: dict[str, str] = {}
        self._ports: dict[str, str] = {}
        self._links = {
            name: None if host.link is None else cluster.links[host.link] for name, host in cluster.machines()
        }
        self._switch = switch = f"trimtab-{job.name}-switch"
        self._create_namespace(switch)
        self._run("link add bridge type bridge", namespace=switch)
        self._run("link set bridge up", namespace=switch)
        for index, (name, _) in enumerate(cluster.machines()):
            namespace, port = f"trimtab-{job.name}-{index}", f"port{index}"
            self._namespaces[name], self._ports[name] = namespace, port
            self._addresses[name] = f"10.83.{(index + 1) // 256}.{(index + 1) % 256}"
            self._create_namespace(namespace)
            self._run(f"link add {INTERFACE} netns {namespace} type veth peer name {port} netns {switch}")
            self._run(f"addr add {self._addresses[name]}/16 dev {INTERFACE}", namespace=namespace)
            self._run("link set lo up", namespace=namespace)
            self._set_congestion(name)
            self._run(f"link set {INTERFACE} up", namespace=namespace)
            self._run(f"link set {port} master bridge up", namespace=switch)
            self.shape(name)

    def address(self, host: str) -> str:
        """The host's address, which only hosts of the same job can reach."""
        return self._addresses[host]

    def namespace(self, host: str) -> str:
        """The name of the host's network namespace."""
        return self._namespaces[host]

    def connect(self, host: str, connected: bool) -> None:
        """Plug the host's cable in, or pull it: what is sent meanwhile is lost and nobody is told."""
        self._run(f"link set {self._ports[host]} {'up' if connected else 'down'}", namespace=self._switch)

    def shape(self, host: str, link: Link | None = None) -> None:
        """Change the rate of the host's link, or set it back to the cluster's."""
        if (link := link or self._links[host]) is not None:
            # A queue shapes outgoing traffic: at the host's end for sending, at the bridge's for receiving.
            self._shape(link, INTERFACE, self._namespaces[host])
            self._shape(link, self._ports[host], self._switch)

    def inside(self, host: str, argv: Sequence[str]) -> list[str]:
        """The command that runs `argv` on the host."""
        # Not `ip netns exec`, which remounts /sys and thereby hides the control groups.
        return ["nsenter", f"--net=/run/netns/{self._namespaces[host]}", "--", *argv]

    def _set_congestion(self, host: str) -> None:
        """By the first that the kernel allows."""
        setting = "/proc/sys/net/ipv4/tcp_congestion_control"
        tries = " || ".join(f"echo {name} > {setting}" for name in _CONGESTION)
        subprocess.run(self.inside(host, ["sh", "-c", tries]), capture_output=True, check=False)

    def _create_namespace(self, name: str) -> None:
        self._job.record("netns", name)
        self._run(f"netns add {name}", hint="needs the capabilities SYS_ADMIN and NET_ADMIN")

    def _shape(self, link: Link, device: str, namespace: str) -> None:
        for arguments, module in queues(link):
            hint = f"this kernel needs the module sch_{module}"
            if module == "netem":
                hint += "; without it remove latency_us from the links"
            self._run(f"qdisc replace dev {device} {arguments}", tool="tc", namespace=namespace, hint=hint)

    def _run(self, arguments: str, tool: str = "ip", namespace: str | None = None, hint: str = "") -> None:
        inside = [] if namespace is None else ["-n", namespace]
        done = subprocess.run(
            [tool, *inside, *arguments.split()],
            capture_output=True,
            text=True,
            env={**os.environ, **self._job.marked},
            check=False,
        )
        if done.returncode != 0:
            message = " ".join(done.stderr.split())
            raise TrimtabError(
                f"emulate: links: `{tool} {arguments}` failed: {message}"
                + (f" ({hint})" if hint else "")
                + f"; or {_UNSHAPED}"
            )


def queues(link: Link) -> list[tuple[str, str]]:
    """Arguments of `tc qdisc replace dev DEVICE` for one end of a link, with the kernel module each needs."""
    rate = link.gbit_per_s * 1e9
    # Large enough not to lose bandwidth to timers, small enough that short messages are limited too.
    burst = max(_MIN_BURST_BYTES, int(rate / 8 * _BURST_S))
    queues = [(f"root handle 1: tbf rate {rate:.0f}bit burst {burst} latency {_QUEUE_MS}ms", "tbf")]
    if link.latency_us:
        # A packet passes two shaped ends, the sender's and the receiver's: half the delay at each.
        delay = f"netem delay {link.latency_us / 2:.1f}us limit 100000"
        queues.append((f"parent 1:1 handle 10: {delay}", "netem"))
    return queues
