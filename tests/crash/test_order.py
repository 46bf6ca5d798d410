"""The order of syncs in the record of a writer: each promise follows the data it rests on."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.cache.making import KINDS
from tests.crash import tracing, work
from tests.crash.tracing import Call, need_strace

SYNCS = ("fsync", "fdatasync")
RENAMES = ("rename", "renameat")
WAL = "index.sqlite-wal"
Test = Callable[[Call], bool]


@pytest.fixture(params=KINDS, scope="module")
def calls(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[Call]:
    need_strace()
    folder = tmp_path_factory.mktemp("order")
    root, log = folder / "cache", folder / "log"
    found = tracing.record(work.writer, root, request.param, log=log, below=root)
    # Paths relative to the cache, and "." for the cache itself.
    return [
        Call(
            call.name,
            call.nth,
            tuple(path.removeprefix(str(root)).lstrip("/") or "." for path in call.paths),
            call.arguments,
            call.result,
        )
        if not call.mark
        else call
        for call in found
        if call.result >= 0
    ]


def test_a_shard_is_on_disk_before_its_row(calls: list[Call]) -> None:
    """The order: bytes synced, file renamed, names synced, row synced, commit acknowledged."""
    told = [place for place, call in enumerate(calls) if call.mark.startswith("committed")]
    assert len(told) == 5
    for place in told:
        numbers = [int(number) for number in calls[place].mark.split()[1:]]
        issued = _last(calls, place, lambda call: call.mark.startswith("issued"))
        commit = calls[issued:place]
        row = _last(commit, len(commit), _is(SYNCS, WAL))
        names = _last(commit, row, _is(SYNCS, "shards"))
        log = _first(commit, names, _is(("pwrite64",), WAL))
        assert names < log < row, "the log must not name a shard whose name may be lost"
        for number in numbers:
            _on_disk(commit[:names], number)


def _on_disk(calls: list[Call], number: int) -> None:
    renames = [
        (place, call.paths[0])
        for place, call in enumerate(calls)
        if call.name in RENAMES
        and f"{number:08d}" in call.paths[1].removeprefix("shards/")
        and call.paths[0].startswith("incoming/")
    ]
    assert renames, f"nothing of shard {number} was renamed"
    for renamed, name in renames:
        files = {
            c.paths[0] for c in calls if c.paths[0].startswith(name) and c.name == "writev"
        }
        assert files, name
        for file in files:
            written = _last(calls, renamed, _is(("writev",), file))
            assert _first(calls, written, _is(SYNCS, file)) < renamed, file
        if files != {name}:  # a directory of arrays, whose names must be synced too
            made = _last(calls, renamed, _makes(name))
            assert _first(calls, made, _is(SYNCS, name)) < renamed, name


def _makes(name: str) -> Test:
    return lambda call: call.name == "openat" and call.paths[0].startswith(f"{name}/")


def test_the_marker_is_on_disk_before_anything_else(calls: list[Call]) -> None:
    """A directory with any contents can be recognised as a cache."""
    named = _first(calls, 0, lambda c: c.name == "rename" and c.paths[1] == "growcache.json")
    temporary = calls[named].paths[0]
    assert _first(calls, 0, _is(SYNCS, temporary)) < named
    synced = _first(calls, named, _is(SYNCS, "."))
    made = {path for call in calls[:synced] if not call.mark for path in call.paths}
    assert made <= {".", temporary, "growcache.json"}


def test_a_shard_is_retired_for_good_before_it_goes(calls: list[Call]) -> None:
    evictions = [place for place, call in enumerate(calls) if call.mark.startswith("evicting")]
    assert len(evictions) == 2
    for place in evictions:
        gone = _first(calls, place, _removes_a_shard)
        retired = _first(calls, place, _is(SYNCS, WAL))
        assert place < retired < gone


def _removes_a_shard(call: Call) -> bool:
    away = call.name in RENAMES and call.paths[1].startswith("incoming/removed-")
    return away or (call.name == "unlinkat" and call.paths[0].startswith("shards/"))


def test_a_group_is_issued_for_good_before_anybody_is_told(calls: list[Call]) -> None:
    told = [place for place, call in enumerate(calls) if call.mark.startswith("issued")]
    assert told
    for place in told:
        named = _last(calls, place, lambda c: c.name == "rename" and c.paths[1] == "issued")
        temporary = calls[named].paths[0]
        written = _last(calls, named, _is(("write",), temporary))
        assert written < _first(calls, written, _is(SYNCS, temporary)) < named
        assert _first(calls, named, _is(SYNCS, ".")) < place


def test_an_edition_stands_beside_the_index_before_it_stands_in_it(calls: list[Call]) -> None:
    named = _first(calls, 0, lambda c: c.name == "rename" and c.paths[1] == "editions.json")
    temporary = calls[named].paths[0]
    assert _first(calls, 0, _is(SYNCS, temporary)) < named
    assert _first(calls, named, _is(SYNCS, ".")) < _first(calls, named, _is(("pwrite64",), WAL))


def test_the_log_is_cut_only_when_the_database_has_it(calls: list[Call]) -> None:
    cuts = [
        place
        for place, call in enumerate(calls)
        if (call.name == "ftruncate" and call.paths[0] == WAL)
        and any(map(_is(("pwrite64",), WAL), calls[:place]))
    ]
    assert cuts
    for cut in cuts:
        synced = _last(calls, cut, _is(SYNCS, "index.sqlite"))
        pages = _last(calls, cut, _is(("pwrite64",), "index.sqlite"))
        log = _last(calls, pages, _is(SYNCS, WAL))
        assert log < pages < synced < cut


def _is(names: tuple[str, ...], path: str) -> Test:
    return lambda call: call.name in names and call.paths[0] == path


def _first(calls: list[Call], start: int, test: Test) -> int:
    return next(_found(range(start, len(calls)), calls, test))


def _last(calls: list[Call], stop: int, test: Test) -> int:
    """Return the last place before ``stop``."""
    return next(_found(range(stop - 1, -1, -1), calls, test))


def _found(places: range, calls: list[Call], test: Test) -> Iterator[int]:
    for place in places:
        if test(calls[place]):
            yield place
    raise AssertionError("a call that must be in the record is not")
