"""Two network namespaces with a link between them that is slow and can be broken."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

STORE_ADDRESS, TRAINER_ADDRESS = "10.77.0.1", "10.77.0.2"
BURST_BYTES = 131_072
QUEUE_MS = 100


@dataclass(frozen=True, slots=True)
class Link:
    """The namespaces and the store's end of the link.

    Attributes:
        store: namespace of the server.
        trainer: namespace of the training loop.
        device: the store's end, by which its answers leave.
    """

    store: str
    trainer: str
    device: str

    def inside(self, namespace: str, command: list[str]) -> list[str]:
        """Return the command that runs `command` in a namespace."""
        return ["ip", "netns", "exec", namespace, *command]

    def set_up(self, up: bool) -> None:
        """Connect or break the link."""
        state = "up" if up else "down"
        _run(*self.inside(self.store, ["ip", "link", "set", self.device, state]))

    def sent_bytes(self) -> int:
        """Return what the store has sent so far."""
        file = f"/sys/class/net/{self.device}/statistics/tx_bytes"
        return int(_run(*self.inside(self.store, ["cat", file])))


@contextmanager
def slow_link(bytes_per_second: float) -> Iterator[Link]:
    """Make the namespaces; they are gone when the block ends."""
    if os.geteuid():
        sys.exit("network namespaces need root")
    name = f"gc{os.getpid()}"
    link = Link(f"{name}s", f"{name}t", f"{name}a")
    for namespace in (link.store, link.trainer):
        _run("ip", "netns", "add", namespace)
    try:
        _connect(link, f"{name}b", bytes_per_second)
        yield link
    finally:
        for namespace in (link.store, link.trainer):
            _run("ip", "netns", "del", namespace)


def _connect(link: Link, other: str, bytes_per_second: float) -> None:
    _run("ip", "link", "add", link.device, "type", "veth", "peer", "name", other)
    ends = (
        (link.store, link.device, STORE_ADDRESS),
        (link.trainer, other, TRAINER_ADDRESS),
    )
    for namespace, device, address in ends:
        _run("ip", "link", "set", device, "netns", namespace)
        for command in (
            ["ip", "address", "add", f"{address}/24", "dev", device],
            ["ip", "link", "set", device, "up"],
            ["ip", "link", "set", "lo", "up"],
        ):
            _run(*link.inside(namespace, command))
    shape = ["tbf", "rate", f"{round(8 * bytes_per_second)}bit", "burst", str(BURST_BYTES)]
    shaped = ["tc", "qdisc", "add", "dev", link.device, "root", *shape]
    _run(*link.inside(link.store, [*shaped, "latency", f"{QUEUE_MS}ms"]))


def _run(*command: str) -> str:
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout
