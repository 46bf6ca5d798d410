"""growcache as its users meet it: a config file, commands as processes, files on disk."""

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
    """Write npy objects whose rows tell object and row; return the URL of all of them."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        values = np.random.default_rng(number).random((rows, columns)).astype(np.float32)
        values[:, 0], values[:, 1] = number, np.arange(rows)
        np.save(folder / f"{number:05d}.npy", values)
    return f"{folder}/*.npy"


def rows_of(url: str, **options: Any) -> dict[str, Any]:
    """Return the source of every row of npy objects; its storage options are the arguments."""
    source = {"url": url, "format": "npy", "options": {"axis": 0}}
    return {**source, "storage_options": options} if options else source


def write_config(path: Path, source: Values, **sections: Values) -> Path:
    """Write a config with small defaults; the cache lies beside it, named as the config is."""
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
    """Change settings of a config file, named as ``section__key``, the way an editor does."""
    values = yaml.safe_load(path.read_text())
    for name, value in settings.items():
        section, _, key = name.partition("__")
        values.setdefault(section, {})[key] = value
    replace_text(path, yaml.safe_dump(values))


def replace_text(path: Path, text: str) -> None:
    """Put a new file in the place of another."""
    other = path.with_name(path.name + ".new")
    other.write_text(text)
    other.rename(path)


def command(*arguments: str | Path) -> list[str]:
    """Return the words that start a command of growcache."""
    return [sys.executable, "-m", "growcache", *map(str, arguments)]


def growcache(
    *arguments: str | Path, seconds: float = 60, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
        **options,
    )


class Running:
    """``growcache run`` in the background, with what it wrote so far.

    Attributes:
        process: of the service.
    """

    def __init__(self, process: subprocess.Popen[bytes], said: Path, told: Path) -> None:
        self.process = process
        self._said = said
        self._told = told

    @property
    def errors(self) -> str:
        """What it wrote to standard error so far."""
        return self._said.read_text(errors="replace")

    @property
    def last(self) -> dict[str, Any]:
        """The last status that it wrote to standard output; empty before the first one."""
        lines = [line for line in self._told.read_bytes().split(b"\n")[:-1] if line]
        found: dict[str, Any] = json.loads(lines[-1]) if lines else {}
        return found

    def wait_for(
        self, holds: Callable[[dict[str, Any]], object], seconds: float = 60
    ) -> dict[str, Any]:
        """Return the first status it wrote for which something holds; fail where none does in time.

        This costs no process, as `wait_for_status` does for every look.
        """
        deadline = time.monotonic() + seconds
        while not (found := self.last) or not holds(found):
            late = time.monotonic() > deadline
            assert not late, f"what was awaited did not come; the last: {found}; {self.errors}"
            assert self.alive, f"the service ended: {self.errors}"
            time.sleep(0.02)
        return found

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self.process.poll() is None


@contextlib.contextmanager
def running(config: Path, *arguments: str, **options: Any) -> Iterator[Running]:
    """Run the service of a config; it does not outlive the block."""
    said = config.with_name(config.name + f".{time.monotonic_ns()}.stderr")
    told = said.with_suffix(".stdout")
    with said.open("wb") as errors, told.open("wb") as output:
        process = _spawn(config, arguments, output, errors, options)
    try:
        yield Running(process, said, told)
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
    """Return ``growcache status --json``; an empty dict while there is no cache.

    The command runs in this process: tests look again and again, and a process that only looks
    costs more than the service that it looks at.
    """
    told = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(io.StringIO()):
        main(["status", str(cache), "--json"])
    told.seek(0)
    found: dict[str, Any] = json.loads(told.read() or "{}")
    return found


def wait_for_status(
    cache: Path, holds: Callable[[dict[str, Any]], object], seconds: float = 60
) -> dict[str, Any]:
    """Return the first status for which something holds; fail where it does not in time."""
    deadline = time.monotonic() + seconds
    while True:
        found = status(cache)
        if found and holds(found):
            return found
        assert time.monotonic() < deadline, f"what was awaited did not come; the last: {found}"
        time.sleep(0.05)


def is_gone(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"


def samples(cache: Path) -> Counter[tuple[int, int]]:
    """What an epoch delivers of `write_objects`: object and row of every sample."""
    found: Counter[tuple[int, int]] = Counter()
    with EpochLoader(cache, batch_size=16, min_samples=1, drop_last=False) as loader:
        for batch in loader:
            rows = np.asarray(batch[next(iter(batch))])
            found.update((int(row[0]), int(row[1])) for row in rows)
    return found


def digests(cache: Path) -> dict[str, str]:
    """Every file of every shard, with its hash."""
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


def wait_until(holds: Callable[[], object], seconds: float = 60) -> None:
    """Return once something holds; fail where it does not in time."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "what was awaited did not happen"
        time.sleep(0.05)
