"""Containers of the compose file without Docker: bubblewrap gives each its mounts, pids, host name and user."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent.parent
COMPOSE = ROOT / "deploy" / "compose" / "compose.yaml"
GROUP = 10001

Service = Mapping[str, Any]


def services() -> dict[str, Service]:
    found: dict[str, Service] = yaml.safe_load(COMPOSE.read_text())["services"]
    return found


def can_run() -> bool:
    """Return whether containers can be made here."""
    if os.geteuid() or shutil.which("bwrap") is None or shutil.which("setpriv") is None:
        return False
    return (
        subprocess.run([*_box("test"), "true"], capture_output=True, check=False).returncode
        == 0
    )


def _box(hostname: str) -> list[str]:
    """Return the command prefix of a container with this machine's programs, read-only."""
    interpreter = Path(sys.base_prefix)
    binds: list[str] = []
    for folder in ("/etc", "/opt", *map(str, reversed(interpreter.parents[:-1]))):
        binds += ["--perms", "0755", "--dir", folder]
    for path in (*_shown_paths(), interpreter):
        if path.is_symlink():
            binds += ["--symlink", str(path.readlink()), str(path)]
        else:
            binds += ["--ro-bind", str(path), str(path)]
    spaces = [f"--unshare-{space}" for space in ("pid", "uts", "ipc", "net")]
    spaces += ["--hostname", hostname]
    ends = ["--as-pid-1", "--die-with-parent"]
    return ["bwrap", "--tmpfs", "/", *binds, "--proc", "/proc", "--dev", "/dev", *spaces, *ends]


def _shown_paths() -> Iterator[Path]:
    """Yield what a container sees: /etc and /opt one by one, so that files can be mounted there."""
    for path in Path("/").iterdir():
        if path.name in ("etc", "opt"):
            yield from path.iterdir()
        elif path.name not in ("dev", "proc", "root", "run", "tmp"):
            yield path


def container(
    service: Service,
    volumes: Mapping[str, Path],
    *,
    hostname: str,
    environment: Mapping[str, str],
    image: Mapping[Path, str],
    command: list[str] | None = None,
) -> list[str]:
    """Return the command line that runs a service of the compose file.

    Args:
        service: as the compose file has it.
        volumes: folders by the names of volumes.
        hostname: of the container.
        environment: added to the service's own.
        image: what else its image has, and where.
        command: instead of the service's.
    """
    mounts: list[str] = []
    for volume in service["volumes"]:
        source, target, *mode = volume.split(":")
        where = volumes.get(source) or (COMPOSE.parent / source).resolve()
        mounts += ["--ro-bind" if mode == ["ro"] else "--bind", str(where), target]
    for where, target in image.items():
        mounts += ["--ro-bind", str(where), target]
    for target in service["tmpfs"]:
        mounts += ["--perms", "1777", "--tmpfs", target]
    variables = {name: value for name, value in service.get("environment", {}).items() if value}
    for name, value in {**variables, **environment, "HOME": "/nonexistent"}.items():
        mounts += ["--setenv", name, value]
    user, group = service["user"].split(":")
    identity = ["setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups"]
    rights = ["--no-new-privs", "--bounding-set=-all", "--inh-caps=-all", "--"]
    words = command or service["command"]
    program = (
        [sys.executable]
        if words[0] == "python"
        else [sys.executable, "-m", "growcache", words[0]]
    )
    return [
        *_box(hostname),
        *mounts,
        "--remount-ro",
        "/",
        *identity,
        *rights,
        *program,
        *words[1:],
    ]


@contextmanager
def running(words: list[str], output: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a container in the background; kill it at the end of the block."""
    with output.open("ab") as stream:
        process = subprocess.Popen(words, stdout=stream, stderr=stream, cwd="/")
    try:
        yield process
    finally:
        if process.poll() is None:
            stop(process, signal.SIGKILL)  # and the kernel everything else in there


def first_pid(process: subprocess.Popen[bytes]) -> int:
    """Return the pid, seen from here, of what is process 1 in a container."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(children[0])


def answer(process: subprocess.Popen[bytes], url: str) -> tuple[int, str]:
    """Ask for a page in a container's network; return the HTTP status, and the text."""
    ask = (
        "import sys, urllib.request, urllib.error\n"
        "try: answer = urllib.request.urlopen(sys.argv[1])\n"
        "except urllib.error.HTTPError as error: answer = error\n"
        "print(answer.status, answer.read().decode())"
    )
    words = [
        "nsenter",
        f"--target={first_pid(process)}",
        "--net",
        sys.executable,
        "-c",
        ask,
        url,
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=True)
    status, _, text = done.stdout.partition(" ")
    return int(status), text.strip()


def stop(process: subprocess.Popen[bytes], number: int = signal.SIGTERM) -> int:
    """Signal process 1 of a container, as ``docker stop`` does, and return its exit code."""
    os.kill(first_pid(process), number)
    return process.wait(timeout=300)
