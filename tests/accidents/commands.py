"""growcache as its users see it: a config file, commands as processes, files on disk."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import yaml

from growcache.cli.cli import main
from growcache.numpy import EpochLoader

Values = Mapping[str, Any]


def write_objects(folder: Path, count: int = 60, rows: int = 16, columns: int = 64) -> str:
    """Write npy objects whose rows start with object and row; return their URL pattern."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        values = np.random.default_rng(number).random((rows, columns)).astype(np.float32)
        values[:, 0], values[:, 1] = number, np.arange(rows)
        np.save(folder / f"{number:05d}.npy", values)
    return f"{folder}/*.npy"


def rows_of(url: str, **options: Any) -> dict[str, Any]:
    """Return a source that takes every row of npy objects; the arguments are storage options."""
    source = {"url": url, "format": "npy", "options": {"axis": 0}}
    return {**source, "storage_options": options} if options else source


def write_config(path: Path, source: Values, **sections: Values) -> Path:
    """Write a config with small defaults; the cache is next to it, under the config's name."""
    values: dict[str, dict[str, Any]] = {
        "source": dict(source),
        "sampling": {"workers": 1, "shard_samples": 16, "timeout_seconds": 10},
        "cache": {"path": str(path.with_suffix("")), "max_bytes": "20MB", "min_free": 0},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    replace_text(path, yaml.safe_dump(values))
    return path


def edit_config(path: Path, **settings: Any) -> None:
    """Change settings, named as ``section__key``, by replacing the file as an editor does."""
    values = yaml.safe_load(path.read_text())
    for name, value in settings.items():
        section, _, key = name.partition("__")
        values.setdefault(section, {})[key] = value
    replace_text(path, yaml.safe_dump(values))


def replace_text(path: Path, text: str) -> None:
    """Replace a file atomically."""
    other = path.with_name(path.name + ".new")
    other.write_text(text)
    other.rename(path)


def command(*arguments: str | Path) -> list[str]:
    """Return the command line of a growcache command."""
    return [sys.executable, "-m", "growcache", *map(str, arguments)]


def growcache(
    *arguments: str | Path, seconds: float = 300, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command until it exits.

    Commands that start no process and run no user's code run in this one: the start of another
    process would cost more than they do.
    """
    if arguments[0] in ("status", "check", "clear", "release") and not options:
        return _run_here([str(argument) for argument in arguments])
    return subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
        **options,
    )


def _run_here(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    stderr = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        code = main(arguments)
    texts = []
    for stream in (stdout, stderr):
        stream.seek(0)
        texts.append(stream.read())
    return subprocess.CompletedProcess(arguments, code, *texts)


class Running:
    """``growcache run`` in the background, with its output up to now.

    Attributes:
        process: The service's process.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], stderr_file: Path, stdout_file: Path
    ) -> None:
        self.process = process
        self._stderr_file = stderr_file
        self._stdout_file = stdout_file

    @property
    def errors(self) -> str:
        """Standard error up to now."""
        return self._stderr_file.read_text(errors="replace")

    @property
    def last(self) -> dict[str, Any]:
        """The last status on standard output; empty before the first one."""
        lines = [line for line in self._stdout_file.read_bytes().split(b"\n")[:-1] if line]
        found: dict[str, Any] = json.loads(lines[-1]) if lines else {}
        return found

    def wait_for(
        self, condition: Callable[[dict[str, Any]], object], seconds: float = 300
    ) -> dict[str, Any]:
        """Return the first printed status that meets the condition; fail at the deadline.

        This starts no command, unlike `wait_for_status`.
        """
        deadline = time.monotonic() + seconds
        while not (found := self.last) or not condition(found):
            late = time.monotonic() > deadline
            assert not late, f"condition not met in time; last status: {found}; {self.errors}"
            assert self.alive, f"the service ended: {self.errors}"
            time.sleep(0.02)
        return found

    @property
    def alive(self) -> bool:
        """Whether the process is running."""
        return self.process.poll() is None


@contextlib.contextmanager
def running(config: Path, *arguments: str, **options: Any) -> Iterator[Running]:
    """Run the service of a config, and kill it at the end of the block."""
    stderr_file = config.with_name(config.name + f".{time.monotonic_ns()}.stderr")
    stdout_file = stderr_file.with_suffix(".stdout")
    with stderr_file.open("wb") as errors, stdout_file.open("wb") as output:
        process = _spawn(config, arguments, output, errors, options)
    try:
        yield Running(process, stderr_file, stdout_file)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def _spawn(
    config: Path,
    arguments: tuple[str, ...],
    output: IO[bytes],
    errors: IO[bytes],
    options: Mapping[str, Any],
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command("run", config, *arguments),
        stdout=output,
        stderr=errors,
        start_new_session=True,
        **options,
    )


def status(cache: Path) -> dict[str, Any]:
    """Return ``growcache status --json``, or an empty dict if there is no cache."""
    found: dict[str, Any] = json.loads(growcache("status", cache, "--json").stdout or "{}")
    return found


def wait_for_status(
    cache: Path, condition: Callable[[dict[str, Any]], object], seconds: float = 300
) -> dict[str, Any]:
    """Return the first status that meets the condition; fail at the deadline."""
    deadline = time.monotonic() + seconds
    while True:
        found = status(cache)
        if found and condition(found):
            return found
        assert time.monotonic() < deadline, f"condition not met in time; last status: {found}"
        time.sleep(0.05)


def is_gone(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"


def samples(cache: Path) -> Counter[tuple[int, int]]:
    """Count the samples of one epoch by object and row, as `write_objects` numbered them."""
    found: Counter[tuple[int, int]] = Counter()
    with EpochLoader(cache, batch_size=16, min_samples=1, drop_last=False) as loader:
        for batch in loader:
            rows = np.asarray(batch[next(iter(batch))])
            found.update((int(row[0]), int(row[1])) for row in rows)
    return found


def digests(cache: Path) -> dict[str, str]:
    """Return the hash of every file in the shard directory."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted((cache / "shards").iterdir())
    }


def damage(paths: Iterable[Path]) -> None:
    """Flip a bit near the end of each file."""
    for path in paths:
        data = bytearray(path.read_bytes())
        data[-5] ^= 1
        path.write_bytes(data)


def message_of(traceback: str) -> str:
    """Return the last message of a traceback, which the hint of its code follows on a line of its own."""
    *_, message, hint = traceback.strip().splitlines()
    assert hint.startswith("(GC")
    return message


def wait_until(condition: Callable[[], object], seconds: float = 300) -> None:
    """Return once the condition is met; fail at the deadline."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "condition not met in time"
        time.sleep(0.05)
