"""OpenSSH's server with keys of the tests' own; its user is the one that runs them."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.servers import free_port, listens, spawn, stop, wait_until

_CONFIG = """Port {port}
ListenAddress 127.0.0.1
HostKey {root}/host
AuthorizedKeysFile {root}/authorized
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
PidFile none
MaxStartups 100
Subsystem sftp internal-sftp
"""


@dataclass(frozen=True)
class Ssh:
    """A running server; ``root`` holds its keys."""

    port: int
    root: Path

    @property
    def options(self) -> dict[str, Any]:
        """Storage options of a user it lets in."""
        return {
            "username": getpass.getuser(),
            "key_filename": str(self.root / "me"),
            "look_for_keys": False,
            "allow_agent": False,
        }

    def url(self, path: Path | str, port: int | None = None) -> str:
        return f"sftp://127.0.0.1:{port or self.port}{path}"


def missing() -> str:
    """Why there can be no server; empty where there can."""
    if _program() is None:
        return "sshd is not installed (Debian: openssh-server)"
    return "" if find_spec("asyncssh") else "asyncssh is not installed (growcache[sftp])"


def _program() -> str | None:
    return shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin")


@contextlib.contextmanager
def sshd(root: Path) -> Iterator[Ssh]:
    """A server that ends with the block, or with this process."""
    for name in ("host", "me", "stranger"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(root / name)]
        subprocess.run(command, check=True)
    shutil.copy(root / "me.pub", root / "authorized")
    port = free_port()
    (root / "config").write_text(_CONFIG.format(port=port, root=root))
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # where root's server has its least rights
    process = spawn([_program() or "sshd", "-D", "-e", "-f", root / "config"])
    try:
        wait_until(lambda: listens(port), "sshd")
        yield Ssh(port, root)
    finally:
        stop(process)


class Relay:
    """Forwards connections to a port, and cuts one of them once, after a number of bytes."""

    def __init__(self, port: int) -> None:
        self.cut_after: int | None = None
        self.cuts = 0
        self.pause_seconds = 0.0  # before each piece that is forwarded
        self.refuses = False
        self.refused = 0
        self._upstream = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def connections(self) -> int:
        """How many are open."""
        return sum(end.fileno() != -1 for end in self._open) // 2

    def cut_all(self) -> None:
        """Break every connection there is now."""
        while self._open:
            _shut(self._open.pop())

    def close(self) -> None:
        """End."""
        self._listener.close()
        self.cut_all()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                ours = self._listener.accept()[0]
                if self.refuses:
                    ours.close()
                    self.refused += 1
                    continue
                theirs = socket.create_connection(("127.0.0.1", self._upstream))
                self._open += [ours, theirs]
                for pair in ((ours, theirs), (theirs, ours)):
                    threading.Thread(target=self._pass, args=pair, daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                passed += len(data)
                if self.cut_after is not None and passed > self.cut_after:
                    self.cut_after, self.cuts = None, self.cuts + 1
                    break
                time.sleep(self.pause_seconds)
                target.sendall(data)
        _shut(source)
        _shut(target)


def _shut(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()


@contextlib.contextmanager
def relay(port: int) -> Iterator[Relay]:
    """A `Relay` that ends with the block."""
    made = Relay(port)
    try:
        yield made
    finally:
        made.close()
