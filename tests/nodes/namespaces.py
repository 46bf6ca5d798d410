"""Nodes as network namespaces, each with a slow link of its own to a bridge."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

NETWORK = "10.211.7"
STORE_ADDRESS = f"{NETWORK}.1"
BURST_BYTES = 16_000
QUEUE_MS = 60  # what would wait longer at a link is dropped


def missing_tools() -> str | None:
    """Return why no namespaces can be made here."""
    if os.geteuid():
        return "network namespaces need root"
    absent = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if absent:
        return f"there is no {absent[0]} (apt-get install iproute2)"
    probe = f"gcp{os.getpid()}"
    try:
        _run("ip", "netns", "add", probe)
        _run("ip", "netns", "del", probe)
    except subprocess.CalledProcessError as error:
        return f"no network namespaces: {error.stderr.strip()}"
    return None


@dataclass(frozen=True, slots=True)
class Namespace:
    name: str
    number: int
    bridged: str  # the bridge's end of its link

    @property
    def address(self) -> str:
        return f"{NETWORK}.{10 + self.number}"

    def inside(self, command: Sequence[str]) -> list[str]:
        """Return the command that runs another one there."""
        return ["ip", "netns", "exec", self.name, *command]

    def cut(self) -> None:
        _run("ip", "link", "set", self.bridged, "down")

    def mend(self) -> None:
        _run("ip", "link", "set", self.bridged, "up")

    def kill(self) -> None:
        """SIGKILL to every process there."""
        for pid in _run("ip", "netns", "pids", self.name).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


@contextmanager
def namespaces(bytes_per_second: Sequence[float]) -> Iterator[list[Namespace]]:
    """Make one for each link; at the end they are gone, with all that runs there."""
    prefix = f"gc{os.getpid() % 10**6}"
    bridge = f"{prefix}br"
    with ExitStack() as stack:
        _run("ip", "link", "add", bridge, "type", "bridge")
        stack.callback(_run, "ip", "link", "del", bridge)
        _run("ip", "address", "add", f"{STORE_ADDRESS}/24", "dev", bridge)
        _run("ip", "link", "set", bridge, "up")
        made = []
        for number, rate in enumerate(bytes_per_second):
            one = Namespace(f"{prefix}n{number}", number, f"{prefix}v{number}")
            _run("ip", "netns", "add", one.name)
            stack.callback(_run, "ip", "netns", "del", one.name)
            stack.callback(one.kill)
            _connect(one, bridge, rate)
            # With its namespace alone it would go later, and its name with it.
            stack.callback(_run, "ip", "link", "del", one.bridged)
            made.append(one)
        yield made


def _connect(one: Namespace, bridge: str, bytes_per_second: float) -> None:
    _run(
        *("ip", "link", "add", one.bridged, "type", "veth"),
        *("peer", "name", "eth0", "netns", one.name),
    )
    _run("ip", "link", "set", one.bridged, "master", bridge)
    _run("ip", "link", "set", one.bridged, "up")
    for command in (
        ["ip", "address", "add", f"{one.address}/24", "dev", "eth0"],
        ["ip", "link", "set", "eth0", "up"],
        ["ip", "link", "set", "lo", "up"],
    ):
        _run(*one.inside(command))
    shape = ["rate", f"{round(8 * bytes_per_second)}bit", "burst", str(BURST_BYTES)]
    shape += ["latency", f"{QUEUE_MS}ms"]
    _run("tc", "qdisc", "add", "dev", one.bridged, "root", "tbf", *shape)
    _run(*one.inside(["tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *shape]))


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
