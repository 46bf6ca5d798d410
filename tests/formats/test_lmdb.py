"""LMDB's own files are read page by page, and files that LMDB would not write are refused."""

from __future__ import annotations

import asyncio
import pickle
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from growcache.errors import FormatError
from growcache.formats import open_format
from growcache.formats.base import ObjectFormat, PartlyReadError
from growcache.formats.lmdb_tree import MOST_BRANCHES, TreeReader
from tests.formats.held import Held, Row, visited
from tests.formats.lmdb_built import small

PAGE = 4096


def written(
    path: Path, work: Callable[[lmdb.Environment], object], map_size: int = 1 << 28
) -> bytes:
    """The data file of an environment that ``work`` filled."""
    with lmdb.open(str(path), subdir=False, map_size=map_size, max_dbs=8, sync=False) as env:
        work(env)
    return path.read_bytes()


def put(values: Mapping[bytes, bytes], **options: Any) -> Callable[[lmdb.Environment], None]:
    def work(env: lmdb.Environment) -> None:
        database = env.open_db(**options) if options else None
        with env.begin(write=True, db=database) as txn:
            for key, value in values.items():
                txn.put(key, value)

    return work


def pairs(rows: list[Row]) -> list[tuple[bytes, bytes]]:
    return [(sample["key"], sample["data"]) for sample, _, _ in rows]


def keyed(**options: Any) -> ObjectFormat:
    return open_format("lmdb", {"key": "bytes", **options})


def numbered(count: int, size: Callable[[int], int]) -> dict[bytes, bytes]:
    return {f"{i}".encode(): bytes([i % 251]) * size(i) for i in range(count)}


CASES: dict[str, dict[bytes, bytes]] = {
    "a single one": {b"k": b"v"},
    "an empty value": {b"k": b"", b"l": b"x"},
    "small": numbered(50, lambda i: i),
    "on the border of a page of its own": numbered(60, lambda i: 1990 + i),
    "large": numbered(40, lambda i: 100_000 + i),
    "of all sizes": numbered(300, lambda i: (i * i * 7) % 9000),
    "two levels of branches": numbered(20_000, lambda i: 100),
    "long keys": {bytes([i % 7]) * 500 + b"%d" % i: b"v" * i for i in range(500)},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("parts", [1, 2, 7, 900])
def test_every_value_is_in_exactly_one_part(tmp_path: Path, name: str, parts: int) -> None:
    values = CASES[name]
    held = Held(written(tmp_path / "d", put(values)))
    if parts == 900 and len(values) > 100:
        parts = 300
    object_format = keyed()
    rows = [row for part in range(parts) for row in visited(object_format, held, part, parts)]
    assert pairs(rows) == sorted(values.items())
    assert asyncio.run(object_format.measure(held)).samples == len(values)
    for sample, start, stop in rows:
        assert held.data[start:stop].endswith(sample["data"])
        assert start < stop
    assert len({row[1:] for row in rows}) == len(rows)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["put", "put", "put", "delete"]),
            st.integers(0, 400),
            st.sampled_from([0, 1, 30, 700, 2020, 2030, 5000, 20_000]),
        ),
        max_size=120,
    ),
    sizes=st.sampled_from([1, 40]),  # values of each step
    parts=st.integers(1, 50),
)
def test_whatever_was_put_and_deleted(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[tuple[str, int, int]],
    sizes: int,
    parts: int,
) -> None:
    model: dict[bytes, bytes] = {}

    def work(env: lmdb.Environment) -> None:
        for action, number, size in steps:
            with env.begin(write=True) as txn:  # each a transaction: pages are used again
                for more in range(sizes):
                    key = b"%d-%d" % (number, more)
                    if action == "put":
                        model[key] = bytes([number % 256]) * size
                        txn.put(key, model[key])
                    else:
                        model.pop(key, None)
                        txn.delete(key)

    held = Held(written(tmp_path_factory.mktemp("l") / "d", work))
    object_format = keyed()
    rows = [row for part in range(parts) for row in visited(object_format, held, part, parts)]
    assert pairs(rows) == sorted(model.items())


def test_named_databases(tmp_path: Path) -> None:
    def work(env: lmdb.Environment) -> None:
        put({b"a": b"1"}, key=b"images")(env)
        put(numbered(2000, lambda i: 50), key=b"labels")(env)

    held = Held(written(tmp_path / "d", work))
    assert pairs(visited(keyed(database="images"), held)) == [(b"a", b"1")]
    assert len(visited(keyed(database="labels"), held)) == 2000
    with pytest.raises(
        FormatError, match=r"^k: expected a database 'image'; found 'images', 'la"
    ):
        visited(keyed(database="image"), held)
    for parts in (1, 3):
        with pytest.raises(FormatError, match=r"names of databases only.*options\.database"):
            visited(keyed(), held, 0, parts)
    plain = Held(written(tmp_path / "e", put({b"a": b"1"})))
    with pytest.raises(FormatError, match="it has no named databases"):
        visited(keyed(database="images"), plain)


def test_many_named_databases_and_values_beside_them(tmp_path: Path) -> None:
    def work(env: lmdb.Environment) -> None:
        with env.begin(write=True) as txn:
            for i in range(300):
                txn.put(b"value-%03d" % i, b"v" * 100)
        for i in range(6):
            put({b"k": b"%d" % i}, key=b"value-%d00-db" % i)(env)

    held = Held(written(tmp_path / "d", work))
    for i in range(6):
        assert pairs(visited(keyed(database=f"value-{i}00-db"), held)) == [(b"k", b"%d" % i)]
    assert len(visited(keyed(), held)) == 300


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("count", [1, 3, 40, 3000])
def test_several_values_of_a_key(tmp_path: Path, fixed: bool, count: int) -> None:
    wanted = [(key, b"%05d" % i) for key in (b"a", b"b", b"c") for i in range(count)]
    wanted += [(b"alone", b"x" * 5)]

    def work(env: lmdb.Environment) -> None:
        database = env.open_db(b"several", dupsort=True, dupfixed=fixed)
        with env.begin(write=True, db=database) as txn:
            for key, value in wanted:
                txn.put(key, value)

    held = Held(written(tmp_path / "d", work))
    object_format = keyed(database="several")
    for parts in (1, 5):
        rows = [
            row for part in range(parts) for row in visited(object_format, held, part, parts)
        ]
        assert pairs(rows) == sorted(wanted)
        assert len({row[1:] for row in rows}) == len(rows)
    assert asyncio.run(object_format.measure(held)).samples == len(wanted)
    for sample, start, stop in rows:
        assert held.data[start:stop].endswith(sample["data"])


def test_integer_keys_and_reversed_ones(tmp_path: Path) -> None:
    def work(env: lmdb.Environment) -> None:
        put({struct.pack("@Q", i): b"%d" % i for i in range(1000)}, key=b"n", integerkey=True)(
            env
        )
        put({b"%03d" % i: b"%d" % i for i in range(1000)}, key=b"r", reverse_key=True)(env)

    held = Held(written(tmp_path / "d", work))
    numbers = [data for _, data in pairs(visited(keyed(database="n"), held))]
    assert numbers == [b"%d" % i for i in range(1000)]
    assert len({data for _, data in pairs(visited(keyed(database="r"), held))}) == 1000


def test_the_newer_of_two_transactions_counts(tmp_path: Path) -> None:
    def work(env: lmdb.Environment) -> None:
        for i in range(5):
            put({b"k": b"%d" % i})(env)

    data = written(tmp_path / "d", work)
    assert pairs(visited(keyed(), Held(data))) == [(b"k", b"4")]
    times = [struct.unpack_from("<Q", data, at + 144)[0] for at in (0, PAGE)]
    assert times[0] != times[1]


@pytest.mark.parametrize("size", [512, 4096, 16_384, 65_536 // 2])
def test_every_page_size(size: int) -> None:
    held = Held(small(size))
    assert pairs(visited(keyed(), held)) == [
        (b"a", b"first"), (b"b", b""), (b"c", b"v" * 700), (b"m", b"one"), (b"m", b"two"),
        (b"z", b"last"),
    ]  # fmt: skip
    assert asyncio.run(keyed().measure(held)).samples == 6


def test_an_empty_database_has_no_samples(tmp_path: Path) -> None:
    held = Held(written(tmp_path / "d", lambda env: None))
    assert visited(keyed(), held) == []
    assert asyncio.run(keyed().measure(held)).samples == 0


def fetched(held: Held) -> int:
    return sum(min(stop or 0, len(held.data)) - start for start, stop in held.asked)


def test_a_visit_reads_its_value_and_the_way_to_it(tmp_path: Path) -> None:
    held = Held(written(tmp_path / "d", put(numbered(500, lambda i: 100_000))))
    object_format = keyed()
    assert len(visited(object_format, held, 3, 500)) == 1
    ways = [stop - start for start, stop in held.asked if stop is not None]
    # What the file says of itself, the root, the leaf, the value with its page's header.
    assert ways == [PAGE + 152, PAGE, PAGE, 100_016]
    held.asked.clear()
    visited(object_format, held, 3, 500, round=1)
    assert [stop - start for start, stop in held.asked if stop is not None] == [100_016]
    held.asked.clear()
    for part in range(500):
        visited(object_format, held, part, 500)
    assert fetched(held) < 1.01 * 500 * 100_000


def test_values_that_lie_together_come_together(tmp_path: Path) -> None:
    held = Held(written(tmp_path / "d", put(numbered(2000, lambda i: 300))))
    object_format = keyed()
    assert len(visited(object_format, held)) == 2000
    assert len(held.asked) < 8
    assert fetched(held) < 1.2 * held.entry.size


def test_values_of_one_page_are_taken_together(tmp_path: Path) -> None:
    for size, together in ((300, range(8, 14)), (5000, range(1, 2))):
        values = numbered(1000, lambda i, size=size: size)  # type: ignore[misc]
        held = Held(written(tmp_path / f"{size}", put(values)))
        assert asyncio.run(keyed().measure(held)).together in together


def test_deep_trees_are_not_read_to_the_end(tmp_path: Path) -> None:
    """Of many small values only a few requests' worth of branches is read."""
    values = {b"%06d" % i + b"k" * 400: b"v" * 20 for i in range(30_000)}
    held = Held(written(tmp_path / "d", put(values)))
    top = asyncio.run(TreeReader(None).top(held))
    assert top.levels >= 2
    assert MOST_BRANCHES < len(top.pages) < 8 * MOST_BRANCHES
    held.asked.clear()
    object_format = keyed()
    rows = [row for part in range(50) for row in visited(object_format, held, part, 50)]
    assert pairs(rows) == sorted(values.items())
    held.asked.clear()
    assert len(visited(object_format, held, 17, 30_000)) <= 3
    assert fetched(held) <= 3 * PAGE


def test_some_are_any_of_them(tmp_path: Path) -> None:
    values = numbered(40, lambda i: 10 if i % 2 else 3000)
    held = Held(written(tmp_path / "d", put(values)))
    seen: list[bytes] = []
    for round in range(200):
        rows = visited(keyed(), held, take=3, round=round)
        assert len(rows) == 3
        seen += [key for key, _ in pairs(rows)]
    counts = [seen.count(key) for key in values]
    assert min(counts) > 2
    assert max(counts) < 40


def test_some_of_very_many_take_a_few_leaves(tmp_path: Path) -> None:
    large = Held(written(tmp_path / "d", put(numbered(6000, lambda i: 3000))))
    assert len(visited(keyed(), large, take=1)) == 1
    assert fetched(large) < 5_000 + 40 * PAGE < large.entry.size // 100
    small = Held(written(tmp_path / "e", put(numbered(60_000, lambda i: 40))))
    assert len(visited(keyed(), small, take=100)) == 100
    assert fetched(small) < small.entry.size // 10


def test_a_visit_of_few_values_makes_few_requests(tmp_path: Path) -> None:
    values = {b"%06d" % i: b"v" * 1500 for i in range(40_000)}
    held = Held(written(tmp_path / "d", put(values)))
    object_format = keyed()
    for round in range(60):  # by which the branches are known
        visited(object_format, held, take=8, round=round)
    requests = []
    for round in range(100, 150):
        held.asked.clear()
        assert len(visited(object_format, held, take=8, round=round)) == 8
        requests.append(len(held.asked))
    assert max(requests) <= 14
    held.asked.clear()
    anew = [pairs(visited(keyed(), held, take=8, round=round)) for round in (100, 149)]
    assert anew == [
        pairs(visited(object_format, held, take=8, round=round)) for round in (100, 149)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("take", [1, 8])
def test_few_of_leaves_that_differ_are_any_of_them(tmp_path: Path, take: int) -> None:
    """A fifth of the values of the first half is left, on leaves that hold fewer."""
    values = {b"%06d" % i: b"v" * 150 for i in range(12_000)}

    def work(env: lmdb.Environment) -> None:
        put(values)(env)
        with env.begin(write=True) as txn:
            for i in range(6000):
                if i % 5:
                    txn.delete(b"%06d" % i)

    held = Held(written(tmp_path / "d", work))
    object_format = keyed()
    rounds = range(2400 // take)
    seen = [
        int(k)
        for n in rounds
        for k, _ in pairs(visited(object_format, held, take=take, round=n))
    ]
    assert len(seen) == 2400
    assert abs(sum(n < 6000 for n in seen) / 2400 - 1 / 6) < 0.15 / 6


def test_some_of_very_many_are_any_of_them(tmp_path: Path) -> None:
    """Also where pages hold few values, or branches few pages, for others were deleted."""
    values = {b"%06d" % i: b"v" * 150 for i in range(12_000)}
    thinned = [key for i, key in enumerate(values) if i < 6000 and i % 5]

    def work(env: lmdb.Environment) -> None:
        put(values)(env)
        for at in range(0, len(thinned), 1000):
            with env.begin(write=True) as txn:
                for key in thinned[at : at + 1000]:
                    txn.delete(key)

    held = Held(written(tmp_path / "d", work))
    object_format = keyed()
    rounds = (visited(object_format, held, take=20, round=round) for round in range(300))
    seen = [int(key) for rows in rounds for key, _ in pairs(rows)]
    assert len(seen) == 6000
    expected = len(seen) * 1200 / 7200
    assert abs(sum(n < 6000 for n in seen) - expected) < 0.1 * expected
    assert len(set(seen)) > 3500


def test_text_keys_and_no_keys(tmp_path: Path) -> None:
    held = Held(written(tmp_path / "d", put({"é".encode(): b"1"})))
    assert visited(open_format("lmdb", {"key": "str"}), held)[0][0] == {
        "data": b"1",
        "key": "é",
    }
    assert visited(open_format("lmdb", {}), held)[0][0] == {"data": b"1"}
    odd = Held(written(tmp_path / "e", put({b"\xff": b"1"})))
    with pytest.raises(FormatError, match="choose key: bytes"):
        visited(open_format("lmdb", {"key": "str"}), odd)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "expected an LMDB data file, found b''"),
        (b"<html>" * 100, "found b'<html><h'"),
        (struct.pack("<I", 0xBEEFC0DE) + bytes(8188), "lock file.*data files only"),
        (bytes(8) + struct.pack("<HH", 0, 8) + struct.pack("<I", 0xBEEFC0DE) + bytes(4096),
         "32-bit machine"),
        (bytes(8) + struct.pack("<HHI", 0, 8, 0) + struct.pack("<II", 0xBEEFC0DE, 2) + bytes(200),
         "found format 2"),
    ],
)  # fmt: skip
def test_what_is_no_data_file(data: bytes, words: str) -> None:
    with pytest.raises(FormatError, match=rf"(?s)^k: .*{words}"):
        visited(keyed(), Held(data))
    with pytest.raises(FormatError, match=rf"(?s)^k: .*{words}"):
        asyncio.run(keyed().measure(Held(data)))


def test_a_file_that_is_cut_off(tmp_path: Path) -> None:
    data = written(tmp_path / "d", put(numbered(50, lambda i: 10_000)))
    held = Held(data[: len(data) // 2])
    wrong = 0
    for part in range(50):
        try:
            visited(keyed(), held, part, 50)
        except FormatError as error:
            wrong += 1
            assert "cut off" in str(error)  # noqa: PT017
    assert 0 < wrong <= 50


def test_pages_that_form_a_circle(tmp_path: Path) -> None:
    data = bytearray(written(tmp_path / "d", put(numbered(2000, lambda i: 300))))
    meta = PAGE if struct.unpack_from("<Q", data, PAGE + 144) > struct.unpack_from(
        "<Q", data, 144
    ) else 0  # fmt: skip
    (root,) = struct.unpack_from("<Q", data, meta + 88 + 40)
    at = root * PAGE
    count = (struct.unpack_from("<H", data, at + 12)[0] - 16) // 2
    for i in range(count):  # each child is the root itself
        node = at + struct.unpack_from("<H", data, at + 16 + 2 * i)[0]
        struct.pack_into("<HHH", data, node, root & 0xFFFF, root >> 16, 0)
    for depth in (2, 3, 30):
        struct.pack_into("<H", data, meta + 88 + 6, depth)
        with pytest.raises(FormatError, match="damaged LMDB file"):
            visited(keyed(), Held(bytes(data)))


def test_values_that_lie_in_one_place(tmp_path: Path) -> None:
    """Many nodes that refer to one large value would take memory without end."""
    data = bytearray(written(tmp_path / "d", put(numbered(60, lambda i: 50_000))))
    leaf = next(at for at in range(2 * PAGE, len(data), PAGE) if data[at + 10] == 2)
    count = (struct.unpack_from("<H", data, leaf + 12)[0] - 16) // 2
    nodes = [leaf + struct.unpack_from("<H", data, leaf + 16 + 2 * i)[0] for i in range(count)]
    size = len(data) // 3
    for node in nodes:
        key = struct.unpack_from("<H", data, node + 6)[0]
        struct.pack_into("<HH", data, node, size & 0xFFFF, size >> 16)
        struct.pack_into("<Q", data, node + 8 + key, 3)
    with pytest.raises(FormatError, match=r"overlap|damaged"):
        visited(keyed(), Held(bytes(data)))


def test_decoded_by_a_function_that_knows_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine_lmdb.py").write_text(
        "import growcache\n"
        "def point(data, key):\n"
        "    if key == b'length':\n"
        "        return None\n"
        "    return growcache.unpickle_arrays(data)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    points = {b"%d" % i: {"x": np.full(5, i, "f4"), "y": np.int64(i)} for i in range(7)}
    values = {key: pickle.dumps(point) for key, point in points.items()}
    held = Held(written(tmp_path / "d", put({**values, b"length": pickle.dumps(7)})))
    object_format = open_format("lmdb", {"decode": "mine_lmdb:point"})
    found = visited(object_format, held)
    assert [int(sample["y"]) for sample, _, _ in found] == list(range(7))
    assert object_format.code_digest
    bad = Held(written(tmp_path / "e", put({b"0": b"nonsense"})), "other")
    with pytest.raises(
        FormatError, match=r"mine_lmdb:point raised .*expected a pickle.*mine_lmd"
    ):
        visited(object_format, bad)


def test_one_value_that_cannot_be_decoded_spoils_no_other(tmp_path: Path) -> None:
    values = {b"a": b"1", b"b\xff": b"2", b"c\xff": b"3", b"d": b"4"}
    held = Held(written(tmp_path / "d", put(values)))
    with pytest.raises(PartlyReadError, match=r"not text.*\(and 1 more\)") as caught:
        visited(open_format("lmdb", {"key": "str"}), held)
    assert [sample["data"] for sample, _, _ in caught.value.found] == [b"1", b"4"]
