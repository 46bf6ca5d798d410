"""What people type or have by mistake: one or two clear lines, and nothing half-written.

The cases are a table, and so is what they say: in docs/reference/inputs.md, which this module writes
(``pytest --write-tables``) and holds to.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from growcache.cache.reader_lease import Lease
from tests.cli.terminals import COMMAND, ROOT
from tests.filled import Filled
from tests.tables import Table, code

Prepare = Callable[[Path], object]


def nothing(_: Path) -> None:
    """All is as in `here`."""


def write(name: str, text: str | bytes) -> Prepare:
    """A file in the folder."""
    data = text.encode() if isinstance(text, str) else text
    return lambda here: (here / name).write_bytes(data)


def forbid(name: str, mode: int) -> Prepare:
    """A file or folder that may not be used."""
    return lambda here: (here / name).chmod(mode)


def make(name: str) -> Prepare:
    """An empty folder."""
    return lambda here: (here / name).mkdir()


def other_seed(here: Path) -> None:
    """A cache that was filled with seed 0; the config says 1."""
    text = (here / "growcache.yaml").read_text()
    run(here, "run growcache.yaml --until-full")
    (here / "growcache.yaml").write_text(text + "sampling: {seed: 1}\n")


CONFIG = """\
source: {url: "data/*.npy"}
cache: {path: cache, max_bytes: 4MB}
"""
LARGE_SHARDS = "sampling: {shard_samples: 20}\n"


@dataclass(frozen=True)
class Case:
    """One mistake.

    Attributes:
        name: of the row.
        typed: the command line.
        exits: with this code.
        prepare: what is wrong with the folder beforehand.
        leaves: what may be there afterwards that was not there before.
        disk: size of the disk that the cache is on.
        held: user of the cache meanwhile: a service, a reader, or none.
    """

    name: str
    typed: str
    exits: int = 2
    prepare: Prepare = nothing
    leaves: tuple[str, ...] = ()
    disk: str = ""
    held: str = ""


CASES = (
    # the command line
    Case("unknown command", "statsu filled"),
    Case("unknown option", "status filled --jsn"),
    Case("missing argument", "run"),
    Case("a word instead of a number", "run growcache.yaml --duration soon"),
    Case("`--set` without a value", "run growcache.yaml --set cache.max_bytes"),
    # the config
    Case("config that does not exist", "run no.yaml"),
    Case("config that is a folder", "run data"),
    Case("config that may not be read", "run growcache.yaml", prepare=forbid("growcache.yaml", 0)),
    Case("config that is no YAML", "run bad.yaml", prepare=write("bad.yaml", "source: [")),
    Case("config that is a list", "run bad.yaml", prepare=write("bad.yaml", "- source")),
    Case("config in another encoding", "run bad.yaml", prepare=write("bad.yaml", b"\xff\xfe\0a")),
    Case("config without a URL", "run bad.yaml", prepare=write("bad.yaml", "cache: {}")),
    Case("unknown key", "run growcache.yaml --set cache.max_byte=1GB"),
    Case("unknown section", "run growcache.yaml --set cach.max_bytes=1GB"),
    Case("a wrong type", "run growcache.yaml --set sampling.workers=many"),
    Case("a size that is none", "run growcache.yaml --set cache.max_bytes=plenty"),
    Case("a choice that is none", "run growcache.yaml --set cache.eviction=lru"),
    Case("unknown format", "run growcache.yaml --set source.format=nyp"),
    Case("unknown option of a format", "run growcache.yaml --set source.options={axes: 0}"),
    Case("a transform that is not there", "run growcache.yaml --set sampling.transform=my:own",
         leaves=("cache",)),
    # the source
    Case("an unknown scheme", "run growcache.yaml --set source.url=s4://bucket/*.npy",
         leaves=("cache",)),
    Case("nothing matches", "run growcache.yaml --set source.url=data/*.txt", leaves=("cache",)),
    Case("a folder that does not exist", "run growcache.yaml --set source.url=/no/*.npy",
         leaves=("cache",)),
    Case("objects of another format",
         "run growcache.yaml --set source.url=bad/*.npy", exits=1, leaves=("cache",),
         prepare=lambda here: (make("bad")(here), write("bad/a.npy", "text")(here))),
    # the cache
    Case("cache that does not exist", "status nowhere"),
    Case("cache path is a file, to look at", "status growcache.yaml"),
    Case("cache path is a file, to fill", "run growcache.yaml --set cache.path=growcache.yaml"),
    Case("cache in a folder without permission", "run growcache.yaml --set cache.path=data/cache",
         prepare=forbid("data", 0o500)),
    Case("cache without permission", "run growcache.yaml --set cache.path=filled",
         prepare=forbid("filled", 0o500)),
    Case("cache that may not be looked at", "status filled", prepare=forbid("filled", 0)),
    Case("`max_bytes` too small", "run growcache.yaml --set cache.max_bytes=200kB",
         leaves=("cache",)),
    Case("`max_bytes` too small for one group",
         "run growcache.yaml --set cache.max_bytes=4MB --set sampling.shard_samples=100",
         leaves=("cache",)),
    Case("a full disk from the start", "run growcache.yaml", exits=1, disk="64k",
         leaves=("cache",)),
    Case("another config than the cache was filled by", "run growcache.yaml", leaves=("cache",),
         prepare=other_seed),
    Case("a service runs on it already", "run growcache.yaml --set cache.path=filled",
         held="service"),
    Case("clear while it is read", "clear filled --yes", held="reader"),
    Case("a shard that is not there", "peek filled --sample 7:0"),
    Case("a sample that is not there", "peek filled --sample 2:10"),
    Case("a place that is none", "peek filled --sample two"),
    Case("export over something", "export filled data"),
    Case("export of nothing", "export nowhere copy"),
    Case("export to where one may not write", "export filled data/copy",
         prepare=forbid("data", 0o500)),
    # init
    Case("init over a file", "init growcache.yaml --yes"),
    Case("init where there is no folder", "init no/growcache.yaml --yes"),
    Case("init where one may not write", "init data/new.yaml --yes", prepare=forbid("data", 0o500)),
    Case("init with a size that is none", "init new.yaml --yes --max-bytes plenty"),
    Case("init with an unknown format", "init new.yaml --yes --format jpg"),
)  # fmt: skip

TABLE = Table(
    page="reference/inputs.md",
    name="bad usage",
    columns=("what is wrong", "typed after `growcache`", "what is said", "exit code"),
    order=[case.name for case in CASES],
    title="Odd and bad inputs",
)


@pytest.fixture(scope="module")
def table(write_tables: bool) -> Iterator[Table]:
    with TABLE.open(writes=write_tables) as opened:
        yield opened


@pytest.fixture
def tmp_path(short_path: Path) -> Path:
    """A short one: the messages of this table hold paths."""
    return short_path


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Path]:
    """A folder with data, a config for it, and a filled cache."""
    (tmp_path / "data").mkdir()
    for i in range(20):
        np.save(tmp_path / "data" / f"{i:02d}.npy", np.full((64, 64), i, "<f4"))
    (tmp_path / "growcache.yaml").write_text(CONFIG)
    with Filled(tmp_path / "filled") as filled:
        filled.add(0, 1, 2)
    yield tmp_path
    for path in [tmp_path, *tmp_path.iterdir()]:
        path.chmod(0o700)


# Others that go through the same lines of code belong to `make test-slow`.
RARE = {
    "unknown option",
    "a word instead of a number",
    "config that is a folder",
    "config that is a list",
    "config in another encoding",
    "config without a URL",
    "unknown section",
    "a size that is none",
    "a choice that is none",
    "unknown option of a format",
    "a folder that does not exist",
    "cache path is a file, to look at",
    "cache that may not be looked at",
    "`max_bytes` too small for one group",
    "a sample that is not there",
    "a place that is none",
    "export of nothing",
    "export to where one may not write",
    "init where there is no folder",
    "init where one may not write",
    "init with a size that is none",
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=case.name.replace("`", ""),
            marks=[pytest.mark.slow] if case.name in RARE else [],
        )
        for case in CASES
    ],
)
def test_a_mistake_is_told_of_in_one_or_two_lines(case: Case, here: Path, table: Table) -> None:
    case.prepare(here)
    before = tree(here)
    with holding(case, here):
        done = run(here, case.typed, case.disk)
    lines = done.stderr.splitlines()
    assert done.returncode == case.exits, done.stderr
    assert 1 <= len(lines) <= 2, done.stderr
    assert "Traceback" not in done.stderr
    assert lines[0].startswith("growcache: ")
    assert all(len(line) < 400 for line in lines)
    new = {path for path in tree(here) - before if path.split("/")[0] not in case.leaves}
    assert new - {"filled/supervisor.lock", "filled/samplers.lock"} == set()
    said = steady(done.stderr.removeprefix("growcache: "), here)
    table.record(case.name, code(case.typed), code(said), str(case.exits))


def run(here: Path, typed: str, disk: str = "") -> subprocess.CompletedProcess[str]:
    """The command as somebody to whom permissions apply, on a small disk if one is wanted."""
    words = [*COMMAND, *_words(typed)]
    if os.geteuid() == 0:
        words = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", *words]
    return on_small_disk(here, shlex.join(words), disk) if disk else start(here, words)


def on_small_disk(here: Path, script: str, size: str) -> subprocess.CompletedProcess[str]:
    """Run a script with the cache on a disk of its own, which ends with it."""
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
        pytest.skip("no disk can be mounted here")
    mount = f"mkdir -p cache && mount -t tmpfs -o size={size} small-disk cache"
    return start(here, ["unshare", "-rm", "sh", "-c", f"{mount} && {script}"])


def start(here: Path, words: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a program in the folder, without a person to answer it."""
    return subprocess.run(
        words,
        cwd=here,
        capture_output=True,
        text=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def _words(typed: str) -> list[str]:
    """Words at spaces that no brace holds together."""
    return re.findall(r"(?:\{[^}]*\}|\S)+", typed)


class holding:
    """Somebody uses the cache meanwhile."""

    def __init__(self, case: Case, here: Path) -> None:
        self._case, self._root = case, here / "filled"
        self._closers: list[Callable[[], None]] = []

    def __enter__(self) -> None:
        if self._case.held == "reader":
            self._closers.append(Lease.create(self._root, "train", [0, 1]).close)
        if self._case.held == "service":
            self._closers.append(Filled(self._root).close)

    def __exit__(self, *_: object) -> None:
        for close in self._closers:
            close()


def tree(here: Path) -> set[str]:
    """Every path below the folder that can be listed."""
    return {
        str(path.relative_to(here)) for path in here.rglob("*") if path.name != "__pycache__"
    }


def steady(text: str, here: Path) -> str:
    """The message without what differs from machine to machine."""
    text = text.strip().replace(str(here), "/home/me")
    text = re.sub(r"pid \d+ on [\w.-]+", "pid 4711 on host", text)
    # Sizes hang a little on how long the names are: two digits of them do not.
    text = re.sub(r"\d{1,3}(,\d{3})+", two_digits, text)
    text = re.sub(r"read by .* \(pid", "read by train.py (pid", text)
    return re.sub(r"host \([^)]*\);", "host (train.py);", text)


def two_digits(found: re.Match[str]) -> str:
    """The number, rounded."""
    number = int(found[0].replace(",", ""))
    return f"{float(f'{number:.1e}'):,.0f}"


def test_a_disk_that_fills_up_costs_no_sample(here: Path) -> None:
    (here / "growcache.yaml").write_text(CONFIG.replace("4MB", "40MB") + LARGE_SHARDS)
    for i in range(400):
        np.save(here / "data" / f"more{i:03d}.npy", np.full((64, 64), i, "<f4"))
    look = " && ".join(
        f"{shlex.join(COMMAND)} {typed}"
        for typed in (
            "run growcache.yaml --duration 5 >log",
            "check cache",
            "status cache --json",
        )
    )
    done = on_small_disk(here, look, "5m")
    assert "Traceback" not in done.stderr
    assert (done.returncode, done.stderr) == (0, "")
    assert "all is well with" in done.stdout
    last = json.loads(done.stdout.splitlines()[-1])
    assert 10 < last["samples"] < 400
    assert "free space on the disk" in (here / "log").read_text()
