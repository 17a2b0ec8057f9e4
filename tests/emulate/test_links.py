"""Links have the requested rate, measured by a real transfer between two hosts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.emulate.machines import pair
from tests.support.requirements import requires

from trimtab.cluster import Cluster, Device, Host, Link
from trimtab.emulate import Emulation
from trimtab.emulate.links import queues
from trimtab.errors import TrimtabError

_RECEIVE = """
import socket, sys, time
server = socket.create_server((sys.argv[1], 5000))
print("up", flush=True)
connection, _ = server.accept()
buffer, count, start = bytearray(1 << 20), 0, time.perf_counter()
while size := connection.recv_into(buffer):
    count += size
print(count * 8 / (time.perf_counter() - start) / 1e9)
"""
_SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 5000)) as connection:
    connection.sendall(bytes(int(sys.argv[2])))
"""
_ECHO = """
import socket, sys
server = socket.create_server((sys.argv[1], 5000))
print("up", flush=True)
connection, _ = server.accept()
while byte := connection.recv(1):
    connection.sendall(byte)
"""
_ROUND_TRIP = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 5000))
times = []
for _ in range(20):
    start = time.perf_counter()
    connection.sendall(b"x")
    connection.recv(1)
    times.append(time.perf_counter() - start)
print(sorted(times)[10] * 1e6)
"""


def _measure(emulation: Emulation, sender: str, receiver: str, seconds: float, gbit_per_s: float) -> float:
    """Rate in Gbit/s of a transfer that should take that many seconds."""
    address = emulation.address(receiver)
    with emulation.start(
        receiver, [sys.executable, "-c", _RECEIVE, address], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        server.stdout.readline()
        size = int(gbit_per_s * 1e9 / 8 * seconds)
        with emulation.start(sender, [sys.executable, "-c", _SEND, address, str(size)]):
            return float(server.stdout.readline())


@requires(root=True, tools=["ip", "tc", "nsenter"])
def test_links_carry_their_rate() -> None:
    cluster = Cluster(
        version=1,
        devices={"d": Device(kind="cpu", speed=1.0)},
        links={"fast": Link(gbit_per_s=1.0), "slow": Link(gbit_per_s=0.1)},
        hosts=(
            Host(name="a", devices={"d": 1}, link="fast"),
            Host(name="b", devices={"d": 1}, link="fast"),
            Host(name="c", devices={"d": 1}, link="slow"),
            Host(name="free", devices={"d": 1}),
        ),
    )
    with Emulation(cluster) as emulation:
        assert 0.8 <= _measure(emulation, "a", "b", 1.5, 1.0) <= 1.05
        assert 0.08 <= _measure(emulation, "c", "a", 1.0, 0.1) <= 0.105  # what c sends
        assert 0.08 <= _measure(emulation, "a", "c", 1.0, 0.1) <= 0.105  # what c receives
        assert 0.8 <= _measure(emulation, "free", "a", 1.0, 1.0) <= 1.05  # the slower end counts


@requires(root=True, tools=["ip", "tc", "nsenter"])
def test_hosts_avoid_congestion_as_most_do_whatever_this_machine_does() -> None:
    setting = "/proc/sys/net/ipv4/tcp_congestion_control"
    machine = Path(setting).read_text()
    with Emulation(pair(gbit_per_s=1.0)) as emulation:
        for host in ("a", "b"):
            with emulation.start(host, ["cat", setting], stdout=subprocess.PIPE, text=True) as shown:
                assert shown.stdout is not None
                assert shown.stdout.read().strip() in ("cubic", "reno")
    assert Path(setting).read_text() == machine


@requires(root=True, tools=["ip", "tc", "nsenter"])
def test_latency_is_given_or_refused() -> None:
    """Where the kernel has no netem the refusal names it; where it has, a round trip takes two latencies."""
    cluster = pair(gbit_per_s=1.0, latency_us=5000.0)
    try:
        with Emulation(cluster) as emulation:
            address = emulation.address("a")
            with emulation.start(
                "a", [sys.executable, "-c", _ECHO, address], stdout=subprocess.PIPE, text=True
            ) as echo:
                assert echo.stdout is not None
                echo.stdout.readline()
                with emulation.start(
                    "b", [sys.executable, "-c", _ROUND_TRIP, address], stdout=subprocess.PIPE, text=True
                ) as trip:
                    assert trip.stdout is not None
                    assert 10_000 <= float(trip.stdout.read()) <= 14_000
    except TrimtabError as error:
        # Either of the two is right, by the kernel.
        refused = str(error)
    else:
        return
    assert "sch_netem" in refused
    assert "remove latency_us" in refused


@requires(root=True, tools=["ip", "tc", "nsenter"])
def test_a_missing_program_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with (
        pytest.raises(TrimtabError, match="need the program `ip`: install iproute2"),
        Emulation(pair(gbit_per_s=1.0)),
    ):
        pass


def test_latency_is_split_between_the_ends() -> None:
    shaped = queues(Link(gbit_per_s=1.0, latency_us=300.0))
    assert [module for _, module in shaped] == ["tbf", "netem"]
    assert "150.0us" in shaped[1][0]
    assert [module for _, module in queues(Link(gbit_per_s=1.0))] == ["tbf"]
