"""A piece of work in a child under strace: recorded, killed at one call, or denied one.

strace delivers an injected SIGKILL while the child stands at the entry of the call, and a
call that is entered by a dying process is not carried out (`test_points` shows it). So a
kill at call n leaves the disk as call n-1 left it, and "after call n" is "at call n+1".
"""

from __future__ import annotations

import ctypes
import multiprocessing
import re
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

# What changes the disk. Between two of these the disk stays as it is, but for the shared
# memory of the index, which whoever opens it next makes anew.
CHANGING = (
    "openat,write,writev,pwrite64,pwritev,fallocate,truncate,ftruncate,fsync,fdatasync,"
    "sync_file_range,copy_file_range,sendfile,rename,renameat,renameat2,link,linkat,symlinkat,"
    "unlink,unlinkat,mkdir,mkdirat,rmdir,flock,fchmod,fchmodat"
)
BY_FOLDER = ("openat", "unlinkat", "renameat", "mkdirat")  # a descriptor, then a name in it
TELLING = "/dev/null"
MAKING = ("O_CREAT", "O_TRUNC")

PR_SET_PTRACER, ANYBODY = 0x59616D61, -1

# Hundreds of forks, and a fork takes as long as its parent is large: pytest has grown by all
# tests before. There is one such server, so this names what any of them needs.
LEAN = multiprocessing.get_context("forkserver")
LEAN.set_forkserver_preload(["tests.crash.work", "tests.cache.test_kills", "sqlite_utils"])

Work = Callable[..., None]

_LINE = re.compile(r"^(\w+)\((.*)\)\s+= (-?\d+|\?)(?:<([^>]*)>)?(.*)$")
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"')
_INSIDE = re.compile(r'(?:\d+|AT_FDCWD)<([^>]*)>, "((?:[^"\\]|\\.)*)"')
_DESCRIPTOR = re.compile(r"^\d+<([^>]*)>")


@dataclass(frozen=True, slots=True)
class Call:
    """A system call of the record.

    Attributes:
        name: of the call.
        nth: how often the child had made calls of this name by then, from 1.
        paths: of the files that it is about.
        arguments: as strace writes them.
        result: what it returned; -1 where it failed.
    """

    name: str
    nth: int
    paths: tuple[str, ...]
    arguments: str
    result: int

    @property
    def mark(self) -> str:
        """What `tell` said, where the call is one of those; else nothing."""
        return _text(self.arguments) if self.paths == (TELLING,) else ""

    def __str__(self) -> str:
        return f"{self.name}#{self.nth} {' → '.join(self.paths)}"


@cache
def missing() -> str | None:
    """Return why nothing can be traced here; None where it can."""
    if shutil.which("strace") is None:
        return "strace is not installed (Debian: apt-get install strace)"
    probe = subprocess.run(
        ["strace", "-qq", "-e", "trace=none", "true"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    return f"strace may not trace here: {probe.stderr.strip()}" if probe.returncode else None


def need_strace() -> None:
    """Skip the test, with the reason, where nothing can be traced."""
    if reason := missing():
        pytest.skip(reason)


def record(
    work: Work, *arguments: Any, log: Path, below: Path, data: bool = False
) -> list[Call]:
    """Do the work to its end and return its calls on files below the directory.

    Args:
        work: done in the child; importable.
        arguments: of it.
        log: where strace writes.
        below: the directory.
        data: keep every written byte in ``Call.arguments``, as hex.
    """
    how = ["-y", "-e", f"trace={CHANGING}"]
    how += ["-xx", "-s", "100000000"] if data else ["-s", "40"]
    code = traced(work, *arguments, how=[*how, "-o", str(log)])
    assert code == 0, f"the work failed without being disturbed: {code}"
    return list(calls_in(log, below, encoded=data))


def killed(work: Work, *arguments: Any, at: Call, log: Path) -> list[str]:
    """Kill the work at the entry of the call; return the marks that it left until then.

    The marks are those of this run: on a busy machine it may make a call more or less than the
    recorded one, because some calls depend on the clock.

    Raises:
        AssertionError: the work ended before the call.
    """
    injection = f"inject={at.name}:signal=SIGKILL:when={at.nth}"
    how = ["-y", "-e", f"trace={at.name},write", "-e", injection, "-s", "40", "-o", str(log)]
    assert died(traced(work, *arguments, how=how)), f"not reached: {at}"
    return [call.mark for call in calls_in(log, Path(TELLING)) if call.mark]


def refused(
    work: Work, *arguments: Any, at: Call, error: str, log: Path, below: Path
) -> tuple[int, list[Call]]:
    """Do the work with an error instead of a call; return its exit code and all its calls.

    Args:
        work: done in the child.
        arguments: of it.
        at: the call.
        error: by its name; with a ``+`` behind it, that and all later calls of this name.
        log: where strace writes.
        below: the directory.
    """
    name, more = error.removesuffix("+"), "+" if error.endswith("+") else ""
    how = ["-y", "-s", "300", "-e", f"trace={CHANGING}", "-o", str(log)]
    how += ["-e", f"inject={at.name}:error={name}:when={at.nth}{more}"]
    code = traced(work, *arguments, how=how)
    return code, list(calls_in(log, below))


def traced(work: Work, *arguments: Any, how: list[str]) -> int:
    """Do the work in a child under strace; return its exit code."""
    ours, theirs = LEAN.Pipe()
    child = LEAN.Process(target=_child, args=(theirs, work, arguments))
    child.start()
    theirs.close()
    ours.recv()
    assert child.pid is not None
    strace = subprocess.Popen(
        ["strace", *how, "-p", str(child.pid)], stderr=subprocess.PIPE, text=True
    )
    try:
        assert strace.stderr is not None
        first = strace.stderr.readline()
        assert "attached" in first, f"strace: {first}{strace.stderr.read()}"
        ours.send(None)
        child.join(300)
        if child.exitcode is None:
            child.kill()
            pytest.fail("the work stands still")
    finally:
        ours.close()
        if child.is_alive():
            child.kill()
        strace.communicate(timeout=300)
    child.join()
    assert child.exitcode is not None
    return child.exitcode


def _child(line: Connection, work: Work, arguments: tuple[Any, ...]) -> None:
    # Where only a parent may trace (Yama), the child allows it, for strace is its cousin.
    ctypes.CDLL(None).prctl(PR_SET_PTRACER, ANYBODY, 0, 0, 0)
    line.send(None)
    line.recv()
    line.close()
    work(*arguments)


def _text(arguments: str) -> str:
    found = _QUOTED.findall(arguments)[0]
    return unhex(found).decode() if found.startswith("\\x") else str(found)


def calls_in(log: Path, below: Path, *, encoded: bool = False) -> Iterator[Call]:
    """Yield the calls of a record on files below the directory, and the marks."""
    counts: Counter[str] = Counter()
    for line in log.read_text().splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        name, arguments, result, made, _ = match.groups()
        counts[name] += 1
        call = Call(
            name,
            counts[name],
            tuple(_paths(name, arguments, made, encoded=encoded)),
            arguments,
            -1 if result == "?" else int(result),
        )
        reads = name == "openat" and not any(flag in arguments for flag in MAKING)
        ours = any(path.startswith(str(below)) for path in call.paths)
        if call.paths == (TELLING,) or (ours and not reads):
            yield call


def _paths(name: str, arguments: str, made: str | None, *, encoded: bool) -> Iterator[str]:
    def plain(text: str) -> str:
        return unhex(text).decode() if encoded and "\\x" in text else text

    descriptor = _DESCRIPTOR.match(arguments)
    if name == "openat" and made:
        yield plain(made)
    elif name in BY_FOLDER:
        for folder, inner in _INSIDE.findall(arguments):
            yield str(Path(plain(folder)) / plain(inner))
    elif descriptor:
        yield plain(descriptor[1])
    elif made:
        yield plain(made)
    else:
        yield from (plain(text) for text in _QUOTED.findall(arguments))


def unhex(text: str) -> bytes:
    r"""Return the bytes that strace writes as ``\x00\x01``."""
    return bytes.fromhex(text.replace("\\x", ""))


def died(code: int) -> bool:
    """Whether the exit code is that of a child that was killed."""
    return code == -signal.SIGKILL
