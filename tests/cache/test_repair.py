"""Damage of every file of a cache: it is found, it is mended, and nothing wrong is served."""

from __future__ import annotations

import os
import random
import re
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from growcache.cache.cache import Cache
from growcache.cache.check import Finding, check, repair
from growcache.cache.deferrals import Deferrals
from growcache.cache.index.reader import read_index
from growcache.cache.index.schema import CacheTotals, ShardTableRow
from growcache.cache.reader_lease import Lease
from growcache.cache.recovery import remade_contents
from growcache.cache.shard_survey import ShardsOnDisk
from growcache.cache.side_files import Identity
from growcache.cache.sidecar import Sidecar
from growcache.cache.status import read_status, write_status
from growcache.cache.status_model import Status
from growcache.cli.cli import main
from growcache.errors import (
    CacheBusyError,
    CacheError,
    CacheMissingError,
    CorruptShardError,
    FingerprintError,
    GrowcacheError,
)
from growcache.loading.snapshot import Snapshot
from growcache.seeding import hash64
from tests.cache.making import KINDS, OTHER, add, config, equal, opened, permit_of, samples_of
from tests.tables import DOCS

KIND = KINDS["tfrecord-ragged"]
LIVE, GONE = frozenset({0, 3, 4, 5, 7}), frozenset({1, 2, 6})
OPEN = frozenset({8})  # issued, and never committed


@dataclass(frozen=True)
class State:
    """What the next service finds."""

    live: frozenset[int]
    unfinished: frozenset[int]
    totals: CacheTotals


def fill(root: Path, kind: Identity = KIND) -> None:
    """A cache with a past: shards of every state, uses, history, a sum of old rows."""
    with opened(root, kind) as cache:
        for number in sorted(LIVE | GONE):
            add(cache, number, 0 if number == 5 else 8)
        cache.meta.issue(max(OPEN))
        cache.index_writer.append_history({"samples": 64})
        with Lease.create(root, "train", [0, 3]) as lease:
            lease.mark_read(0, mapped=False)
            lease.mark_read(3, mapped=False)
        cache.poll_leases(time.monotonic())
        cache.evict([1, 2])
        cache.index_writer.write(lambda: cache.index_writer.index.prune_deleted(0))
        cache.evict([6])
        write_status(root, Status(state="running", shards=5))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stopped cache."""
    root = tmp_path_factory.mktemp("whole") / "cache"
    fill(root)
    return root


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a service leaves that is killed: the index has a log."""
    return kill(tmp_path_factory.mktemp("killed"))


def kill(here: Path, kind: Identity = KIND) -> Path:
    """Fill a cache, and return what is there while its service runs."""
    fill(here / "running", kind)
    with opened(here / "running", kind) as cache:
        cache.index_writer.append_history({"samples": 65})
        shutil.copytree(here / "running", here / "cache")
    assert (here / "cache" / "index.sqlite-wal").stat().st_size
    return here / "cache"


@pytest.fixture
def root(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "cache"))


def errors(found: list[Finding]) -> list[Finding]:
    return [finding for finding in found if finding.severity == "error"]


def start(root: Path, kind: Identity = KIND) -> State:
    """Let a service start; every sample that it serves is right."""
    with opened(root, kind) as cache:
        unfinished = cache.unfinished(cache.meta.issued + 1, 1)
        read_all(root, kind)
        live = frozenset(row.number for row in read_index(root).shards)
        return State(live, frozenset(unfinished), cache.totals())


def read_all(root: Path, kind: Identity = KIND) -> None:
    """Read as a loader does: a sample is the right one, or its shard is refused."""
    with Snapshot.take(root, verify="always", job="") as snapshot:
        for row in snapshot.shards:
            try:
                shard = snapshot.mapped(row.number)
            except CorruptShardError:
                continue
            expected = samples_of(row.number, row.samples, kind.schema)
            assert all(map(equal, shard, expected))


def mends(
    root: Path, lost: set[int], kind: Identity = KIND, again: set[int] | None = None
) -> State:
    """Repair a cache; all but the lost shards are there, and those are drawn again."""
    assert not errors(repair(root))
    assert not errors(check(root))
    state = start(root, kind)
    assert state.live == LIVE - lost
    again = lost if again is None else again
    assert again <= state.unfinished <= OPEN | again
    totals = state.totals
    assert totals.drawn == totals.samples + totals.evicted_samples + totals.lost_samples
    return state


def flip(path: Path, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(bit // 8)
        (byte,) = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def bits_of(root: Path) -> Iterator[tuple[Path, int]]:
    """Every file with its size in bits."""
    for path in sorted(root.rglob("*")):
        if path.is_file() and path.stat().st_size:
            yield path.relative_to(root), 8 * path.stat().st_size


def shards_of(path: Path) -> set[int]:
    return {int(path.parts[1][:8])} if path.parts[0] == "shards" else set()


def verify_flip(template: Path, root: Path, path: Path, bit: int, kind: Identity) -> None:
    """A flipped bit is found and mended, or what the next service finds is as without it."""
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(template, root)
    flip(root / path, bit)
    try:
        read_all(root, kind)
        read_status(root)
    except GrowcacheError:
        pass  # says so in words
    found = errors(check(root))
    lost = shards_of(path)
    if lost:
        assert found, "of what lies in shards, every bit counts"
    if found:
        mends(root, lost, kind)
        return
    state = start(root, kind)
    assert (state.live, state.unfinished) == (LIVE, OPEN)
    assert state.totals.drawn == state.totals.samples + state.totals.evicted_samples
    assert not errors(check(root))


def test_a_flipped_bit_is_found_and_mended(whole: Path, killed: Path, tmp_path: Path) -> None:
    verify_flips([whole, killed], tmp_path / "cache", count=12, seed=random.randrange(1000))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", KINDS)
def test_many_flipped_bits_are_found_and_mended(name: str, tmp_path: Path) -> None:
    kind, whole = KINDS[name], tmp_path / "whole"
    fill(whole, kind)
    templates = [whole, kill(tmp_path, kind)]
    verify_flips(templates, tmp_path / "flipped", count=250, seed=hash64(name), kind=kind)


def verify_flips(
    templates: list[Path], root: Path, *, count: int, seed: int, kind: Identity = KIND
) -> None:
    """Flip bits of files by chance; half of them in the index, where a bit may do anything."""
    rng = random.Random(seed)
    for _ in range(count):
        template = rng.choice(templates)
        sizes = dict(bits_of(template))
        index = [path for path in sizes if path.name.startswith("index.sqlite")]
        path = rng.choice(rng.choice([index, list(sizes)]))
        bit = rng.randrange(sizes[path])
        try:
            verify_flip(template, root, path, bit, kind)
        except Exception as error:
            where = f"bit {bit} of {path}, of {template}, seed {seed}"
            raise AssertionError(where) from error


DEFINITIONS = {
    "a column has another name": (b'"number" INTEGER', 1, 0),
    "what SQLite says of it is no text": (b"tableshardsshards", 5, 7),
    "a table has another name": (b"tableshardsshards", 5, 0),
    "what was made has another name": (b"the_cache20", 0, 1),
    "it is not noted what was made": (b"_sqlite_migrations_sqlite_migrations", 0, 0),
}


@pytest.mark.parametrize("name", DEFINITIONS)
def test_definitions_of_tables_are_mended(name: str, whole: Path, tmp_path: Path) -> None:
    text, place, bit = DEFINITIONS[name]
    data = (whole / "index.sqlite").read_bytes()
    assert data.count(text) == 1
    flipped = 8 * (data.index(text) + place) + bit
    copy = shutil.copytree(whole, tmp_path / "copy")
    flip(copy / "index.sqlite", flipped)
    assert errors(check(copy))
    verify_flip(whole, tmp_path / "cache", Path("index.sqlite"), flipped, KIND)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_flips_in_the_definitions_of_tables(whole: Path, tmp_path: Path) -> None:
    data, rng = (whole / "index.sqlite").read_bytes(), random.Random(1)
    places = [place for place in range(100, 4096) if data[place]]
    for _ in range(300):
        place, bit = rng.choice(places), rng.randrange(8)
        try:
            verify_flip(whole, tmp_path / "cache", Path("index.sqlite"), 8 * place + bit, KIND)
        except Exception as error:
            raise AssertionError(f"byte {place}, bit {bit}") from error


# The table of docs/reference/reliability.md, row by row.

HARM: dict[str, Callable[[Path], object]] = {
    "deleted": Path.unlink,
    "cut off": lambda path: os.truncate(path, path.stat().st_size // 2),
    "zeroed": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "bits flipped": lambda path: flip(path, 3),
    "deleted after a `kill -9`": Path.unlink,
    "left behind": lambda path: path.write_bytes(b"half a shard"),
}
QUIET = {
    "a number": "UPDATE shards SET number = 33 WHERE number = 6",
    "a state": "UPDATE shards SET state = 2 WHERE number = 3",
    "a digest or a total is another": "UPDATE totals SET value = value + 1",
}
PLACES = {
    "a shard's samples": "shards/00000003.tfrecord",
    "a shard's sidecar": "shards/00000003.json",
    "leases/\\* of a dead reader": f"leases/{'a' * 32}.lease",
    "incoming/\\*": f"incoming/{permit_of(8)}-00000008.tfrecord",
}


def table() -> list[tuple[str, str, str, str, str]]:
    """Return (file, harm, what check says, what a run does, what repair does) one by one."""
    text = (
        (DOCS / "reference/reliability.md")
        .read_text(encoding="utf-8")
        .partition("\n## Repair\n")[2]
    )
    text = text.partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|`]+) \| ([^|]+) \| (\w+) \| ([^|]+) \| ([^|]+) \|$", text, re.M)
    return [
        (file, harm, *rest)
        for files, harms, *rest in rows
        if harms != "---"
        for file in files.split(", ")
        for harm in harms.split(", ")
    ]


def sql(root: Path, statement: str) -> None:
    with closing(sqlite3.connect(root / "index.sqlite")) as connection, connection:
        connection.execute(statement)


def do(root: Path, file: str, harm: str) -> None:
    """Do to a file what a row of the table says."""
    if file == "all but shards/":
        for path in root.iterdir():
            if path.is_file():
                path.unlink()
            elif path.name != "shards":
                shutil.rmtree(path)
    elif harm in QUIET:
        sql(root, QUIET[harm])
    else:
        path = root / PLACES.get(file, file)
        if path.suffix == ".lease":
            shutil.copy(root / "identity.json", path)
        HARM[harm](path)


@pytest.mark.parametrize(("file", "harm", "said", "run", "mended"), table())
def test_what_becomes_of_damage(
    file: str,
    harm: str,
    said: str,
    run: str,
    mended: str,
    whole: Path,
    killed: Path,
    tmp_path: Path,
) -> None:
    template = killed if "kill" in harm else whole
    one = Path(shutil.copytree(template, tmp_path / "one"))
    do(one, file, harm)
    worst = {finding.severity for finding in check(one)} - {"mended"}
    assert worst == ({said} if said != "nothing" else set())
    other = Path(shutil.copytree(one, tmp_path / "other"))
    lost = {3} if PLACES.get(file, "").startswith("shards/") else set()
    match run:
        case "mends it":
            state = start(one)
            assert (state.live, len(check(one))) == (LIVE, 0)
        case "goes on":
            assert start(one).live == LIVE
        case "loses the shard":
            state = start(one)
            assert (state.live, state.totals.lost_shards) == (LIVE - lost, 1)
        case "asks for the repair":
            with pytest.raises(CacheError, match=f"growcache check {one} --repair"):
                start(one)
        case _:
            raise AssertionError(f"what is {run!r}?")
    found = repair(other)
    match mended:
        case "mends it" | "has it drawn again":
            assert {finding.severity for finding in found} == {"mended"}
            mends(other, lost)
        case "has nothing to do":
            assert not errors(found)
            assert start(other).live == LIVE
        case "leaves it to the run":
            assert errors(found)
            assert start(other).live == LIVE
        case _:
            raise AssertionError(f"what is {mended!r}?")


def test_every_bit_of_a_description_counts(root: Path) -> None:
    data = (root / "shards" / "00000003.json").read_bytes()
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptShardError):
            Sidecar.from_bytes(bytes(flipped))


def test_damaged_shards_leave_the_rest_of_a_sound_index_as_it_is(root: Path) -> None:
    before = start(root)
    flip(root / "shards" / "00000004.tfrecord", 900)
    state = mends(root, {4})
    assert (state.totals.drawn, state.totals.evicted_samples, state.totals.delivered) == (
        before.totals.drawn - 8,
        before.totals.evicted_samples,
        before.totals.delivered,
    )
    with opened(root, KIND) as cache:
        assert {c.number: c.uses for c in cache.candidates()} == {0: 1, 3: 1, 5: 0, 7: 0}
        assert cache.history()[0][1] == {"samples": 64}
        assert [c.number for c in cache.candidates()] == sorted(LIVE - {4}), "the order of age"


def test_of_a_damaged_index_the_shards_are_kept(root: Path) -> None:
    before = start(root)
    sql(root, QUIET["a state"])
    totals = mends(root, set()).totals
    assert totals.samples == before.totals.samples
    assert totals.drawn_shards == len(LIVE | GONE | OPEN)
    with opened(root, KIND) as cache:
        assert {c.number: c.uses for c in cache.candidates()} == dict.fromkeys(LIVE, 0)
        assert [c.number for c in cache.candidates()] == sorted(LIVE), "the order of age"


def test_a_group_in_flight_is_not_taken_for_drawn(root: Path) -> None:
    flip(root / "shards" / "00000004.tfrecord", 900)
    assert mends(root, {4}).unfinished == OPEN | {4}


def test_what_was_lost_is_counted_once(root: Path) -> None:
    (root / "shards" / "00000003.tfrecord").unlink()
    assert start(root).totals.lost_shards == 1
    sql(root, QUIET["a number"])
    totals = mends(root, {3}, again=set()).totals
    assert totals.drawn == totals.samples + totals.evicted_samples + totals.lost_samples


def test_readers_keep_what_they_hold(root: Path) -> None:
    with Snapshot.take(root, job="train") as snapshot:
        held = snapshot.mapped(3)
        flip(root / "shards" / "00000004.tfrecord", 900)
        shutil.copy(root / "shards" / "00000003.tfrecord", root / "before")
        sql(root, QUIET["a state"])
        assert not errors(repair(root))
        with pytest.raises(CorruptShardError):
            snapshot.mapped(4)
        assert all(map(equal, held, samples_of(3, 8, KIND.schema)))
        assert snapshot.lease.path.exists()
    (root / "before").unlink()
    assert start(root).live == LIVE - {4}


def test_what_was_set_aside_is_there_until_the_next_start(root: Path) -> None:
    flip(root / "shards" / "00000004.tfrecord", 900)
    assert {finding.shard for finding in repair(root)} == {4}
    aside = {path.name for path in (root / "incoming").iterdir()}
    assert aside == {
        f"set-aside-00000004{end}" for end in (".json", ".tfrecord", ".offsets.npy")
    }
    assert {finding.severity for finding in check(root)} == {"info"}
    start(root)
    assert not list((root / "incoming").iterdir())


def test_a_cache_of_which_something_is_missing_is_not_complete(root: Path) -> None:
    with opened(root, KIND) as cache:
        cache.meta.set_complete(True)
    flip(root / "shards" / "00000004.tfrecord", 900)
    repair(root)
    assert not read_index(root).complete


def test_a_repair_that_was_cut_short_is_done_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "index.sqlite").write_bytes(b"no index")
    flip(root / "shards" / "00000004.tfrecord", 900)

    def dies(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    for step in ("_set_damaged_aside", "_write_index", "write_side_files", "write_identity"):
        with monkeypatch.context() as patch:
            patch.setattr(f"growcache.cache.check.{step}", dies)
            with pytest.raises(KeyboardInterrupt):
                repair(root)
        other = Path(shutil.copytree(root, root.parent / step))
        assert not errors(repair(other))
        assert not errors(check(other))
        assert start(other).live == LIVE - {4}
        (root / "index.sqlite").write_bytes(b"no index")


def test_shards_of_another_configuration_are_refused_and_kept(root: Path) -> None:
    do(root, "all but shards/", "deleted")
    for _ in range(2):  # the first refusal must not be the end of them
        with Cache.open(root, config(root)) as cache:
            cache.claim(OTHER.parts)
            with pytest.raises(FingerprintError, match="samples of another configuration"):
                cache.set_identity(OTHER)
        assert len(list((root / "shards").glob("*.json"))) == len(LIVE)
    assert start(root).live == LIVE


def test_nobody_repairs_under_a_service(root: Path) -> None:
    with opened(root, KIND):
        with pytest.raises(CacheBusyError, match=f"pid {os.getpid()}") as refused:
            repair(root)
        assert refused.value.exit_code == 2
        assert not check(root)


def test_no_cache_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(CacheMissingError, match="no cache at"):
        repair(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_copy_of_the_listing_that_is_none_is_removed(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    catalog = root / "catalog.bin"
    catalog.write_bytes(b"something else entirely")
    assert main(["check", str(root)]) == 1
    assert main(["check", str(root), "--repair"]) == 0
    assert "catalog.bin is damaged from its start" in capsys.readouterr().out
    assert not catalog.exists()


@given(
    on_disk=st.sets(st.integers(0, 30)),
    damaged=st.sets(st.integers(0, 30)),
    issued=st.integers(-1, 35),
)
def test_every_number_that_was_issued_is_accounted_for(
    on_disk: set[int], damaged: set[int], issued: int
) -> None:
    seen = ShardsOnDisk({n: row(n, 0) for n in on_disk - damaged}, frozenset(damaged))
    made = remade_contents(seen, KIND, [], Deferrals(), issued)
    numbers = {row.number for row in made.rows}
    gone = {n for r in made.ranges for n in range(r.first, r.last + 1)}
    assert len(numbers) == len(made.rows), "one row each"
    assert numbers == seen.whole.keys()
    assert not gone & numbers
    assert not damaged & (gone | numbers), "what is damaged is drawn again"
    assert set(range(issued + 1)) <= gone | numbers | damaged, "nothing is drawn twice"
    counted = sum(row.samples for row in made.rows)
    assert made.totals.get("drawn", 0) == counted
    assert made.totals["drawn_shards"] == len(made.rows) + len(gone)
    assert [row.seq for row in made.rows] == list(range(len(made.rows)))


def row(number: int, seq: int, state: int = 0) -> ShardTableRow:
    return ShardTableRow(number, seq, state, number, 0, 0, 8, 8, 0, 99, 4096, 9, "d", 0.0, 0)
