from __future__ import annotations

import errno
import os
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from growcache.errors import CacheError, CacheFullError
from growcache.store.catalog import BLOCK_ENTRIES, Catalog
from growcache.store.contract import Entry
from growcache.store.key_set import KeySet

NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
ENTRIES = st.lists(
    st.builds(
        Entry,
        NAMES,
        st.one_of(st.integers(0, 300), st.integers(0, 1 << 50)),
        st.one_of(st.none(), NAMES, st.just('"' + 32 * "a" + '"')),
        st.one_of(st.none(), st.floats(0, 2e9)),
        st.integers(0, 3),
    ),
    max_size=200,
)


def some(count: int, first: int = 0) -> list[Entry]:
    return [
        Entry(f"rec/{n:07}.npy", 1000 + n, f'"{n * 7919:032x}"', 1.7e9 + n)
        for n in range(first, first + count)
    ]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "catalog.bin"


@pytest.fixture
def catalog(path: Path) -> Iterator[Catalog]:
    with Catalog.open(path) as catalog:
        yield catalog


@given(pages=st.lists(ENTRIES, max_size=4), flushed=st.lists(st.booleans(), min_size=4))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_flushed_is_there_again(
    tmp_path: Path, pages: list[list[Entry]], flushed: list[bool]
) -> None:
    path = tmp_path / f"{time.monotonic_ns()}.bin"
    expected: dict[tuple[int, str], Entry] = {}
    with Catalog.open(path) as catalog:
        for page, flush in zip(pages, flushed, strict=False):
            before = len(expected)
            for entry in page:
                expected.setdefault((entry.store, entry.key), entry)
            assert catalog.append(page) == len(expected) - before
            if flush:
                catalog.flush()
        catalog.flush()
        entries = list(expected.values())
        assert [catalog.entry(n) for n in range(len(catalog))] == entries
        digests = [catalog.digest(n) for n in range(len(catalog) + 1)]
    with Catalog.open(path, readonly=True) as again:
        assert again.entries(np.arange(len(again))) == entries
        assert again.sizes.tolist() == [entry.size for entry in entries]
        assert [again.digest(n) for n in range(len(again) + 1)] == digests
        assert len(set(digests)) == len(digests)


def test_digests_do_not_depend_on_blocks(tmp_path: Path) -> None:
    entries = some(3 * BLOCK_ENTRIES + 5)
    found = []
    for step in (1, 7, BLOCK_ENTRIES, 1000):
        with Catalog.open(tmp_path / f"{step}") as catalog:
            for at in range(0, len(entries), step):
                catalog.append(entries[at : at + step])
                if step == 7:
                    catalog.flush()
            found.append(
                [
                    catalog.digest(n)
                    for n in (0, 1, BLOCK_ENTRIES, BLOCK_ENTRIES + 1, len(entries))
                ]
            )
    assert found[0] == found[1] == found[2] == found[3]


def test_a_torn_tail_is_cut_off(path: Path) -> None:
    with Catalog.open(path) as catalog:
        catalog.append(some(BLOCK_ENTRIES))
        catalog.flush()
        whole = path.stat().st_size
        catalog.append(some(BLOCK_ENTRIES, BLOCK_ENTRIES))
        catalog.flush()
    data = path.read_bytes()
    for cut in (whole, whole + 1, whole + 9, whole + 40, len(data) - 1):
        path.write_bytes(data[:cut])
        with Catalog.open(path, readonly=True) as read:
            assert len(read) == BLOCK_ENTRIES
        assert path.stat().st_size == cut
        with Catalog.open(path) as mended:
            assert len(mended) == BLOCK_ENTRIES
            assert path.stat().st_size == whole
            assert mended.append(some(2 * BLOCK_ENTRIES)) == BLOCK_ENTRIES
            mended.flush()
            assert mended.entry(2 * BLOCK_ENTRIES - 1) == some(2 * BLOCK_ENTRIES)[-1]


def test_a_damaged_block_ends_the_catalog(path: Path) -> None:
    with Catalog.open(path) as catalog:
        catalog.append(some(2 * BLOCK_ENTRIES))
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with Catalog.open(path) as catalog:
        assert len(catalog) == BLOCK_ENTRIES


@pytest.mark.parametrize("taken", [0, 1, 9, 200])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_costs_no_key(
    path: Path, monkeypatch: pytest.MonkeyPatch, taken: int, number: int
) -> None:
    """The first write fails, or one that has taken a part of the frame."""
    write, left = os.pwrite, [taken]

    def full(descriptor: int, data: bytes, offset: int) -> int:
        if not left[0]:
            raise OSError(number, os.strerror(number))
        count = write(descriptor, bytes(data)[: left[0]], offset)
        left[0] -= count
        return count

    entries = some(5 * BLOCK_ENTRIES + 3)
    with Catalog.open(path) as catalog:
        catalog.append(entries[:BLOCK_ENTRIES])
        whole = path.stat().st_size
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            with pytest.raises(CacheFullError, match=r"no room on the disk .*catalog\.bin"):
                catalog.append(entries[: 3 * BLOCK_ENTRIES + 1])
            with pytest.raises(CacheFullError):
                catalog.flush()
            with pytest.raises(CacheFullError):
                catalog.complete = True
        assert path.stat().st_size == whole
        assert not catalog.complete
        assert catalog.entries(range(len(catalog))) == entries[: 3 * BLOCK_ENTRIES + 1]
        assert catalog.append(entries) == 2 * BLOCK_ENTRIES + 2
        catalog.complete = True
    with Catalog.open(path) as again:
        assert again.entries(range(len(again))) == entries
        assert again.digest(len(entries)) == digest_of(path.with_name("other"), entries)


def digest_of(path: Path, entries: list[Entry]) -> str:
    with Catalog.open(path) as catalog:
        catalog.append(entries)
        return catalog.digest(len(entries))


def test_a_full_disk_shows_at_the_sync_too(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CacheFullError, match="quota exceeded"):
        catalog.flush()


def test_what_a_failed_sync_lost_is_not_believed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a second fsync nor a read shows what the first one lost."""

    def failing(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    entries = some(3 * BLOCK_ENTRIES)
    with Catalog.open(path) as catalog:
        catalog.append(entries[:BLOCK_ENTRIES])
        catalog.flush()
        catalog.append(entries[BLOCK_ENTRIES:])
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", failing)
            with pytest.raises(CacheError, match="Input/output"):
                catalog.flush()
        with pytest.raises(CacheError, match="start again"):
            catalog.flush()
        with pytest.raises(CacheError, match="start again"):
            catalog.append(some(BLOCK_ENTRIES, first=3 * BLOCK_ENTRIES))
        assert catalog.entries(range(3 * BLOCK_ENTRIES)) == entries
    with Catalog.open(path) as again:
        assert again.entries(range(len(again))) == entries[:BLOCK_ENTRIES]
        assert again.append(entries) == 2 * BLOCK_ENTRIES


def test_a_failing_disk_is_named(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pwrite", failing)
    with pytest.raises(CacheError, match=r"cannot write the listing .*Input/output") as caught:
        catalog.append(some(BLOCK_ENTRIES))
    assert not isinstance(caught.value, CacheFullError)


@pytest.mark.parametrize(
    "limits", [(0, 0), (0, 1), (3, 200), (BLOCK_ENTRIES, 2 * BLOCK_ENTRIES), (100, 203)]
)
def test_keys_come_in_pieces(catalog: Catalog, limits: tuple[int, int]) -> None:
    catalog.append(some(3 * BLOCK_ENTRIES))
    catalog.append(some(203))  # the last eleven are not written yet
    found = [key for _, keys in catalog.stores_and_keys(*limits) for key in keys]
    assert found == [entry.key for entry in some(203)[slice(*limits)]]
    with pytest.raises(IndexError, match="203 entries"):
        list(catalog.stores_and_keys(0, 204))


def test_another_file_is_refused(path: Path) -> None:
    path.write_bytes(b"something else entirely")
    with pytest.raises(CacheError, match="not a catalog"):
        Catalog.open(path)
    assert path.read_bytes() == b"something else entirely"


@pytest.mark.parametrize("crash", [b"", b"GCC"])
def test_a_crash_in_the_first_write_is_mended(path: Path, crash: bytes) -> None:
    path.write_bytes(crash)
    with Catalog.open(path) as catalog:
        assert catalog.append(some(1)) == 1


def test_keys_of_one_hash_are_two_keys(path: Path) -> None:
    with Catalog.open(path, key_hash=lambda key: len(key)) as catalog:
        assert catalog.append(some(100)) == 100
        assert catalog.append(some(101)) == 1
        catalog.flush()
    with Catalog.open(path, key_hash=lambda key: len(key)) as again:
        assert again.append(some(101)) == 0
        assert again.append(some(102)) == 1
        assert again.entry(101) == some(102)[-1]


def test_the_same_key_of_two_urls_is_two_objects(catalog: Catalog) -> None:
    assert catalog.append([Entry("k", 1, None, None, 0), Entry("k", 2, None, None, 1)]) == 2


@pytest.mark.mutant(
    1,
    "growcache.store.catalog:Catalog.append",
    "seen.add(keys, self._count, self._identities_of)",
    "[seen.add(keys, self._count, self._identities_of), *range(len(keys))][1:]",
)
def test_a_known_key_keeps_what_it_was(catalog: Catalog) -> None:
    catalog.append([Entry("k", 1, '"a"', None)])
    assert catalog.append([Entry("k", 2, '"b"', None)]) == 0
    assert catalog.entry(0) == Entry("k", 1, '"a"', None)


def test_complete_is_kept_and_may_be_taken_back(path: Path) -> None:
    with Catalog.open(path) as catalog:
        assert not catalog.complete
        catalog.append(some(3))
        catalog.complete = True
    with Catalog.open(path) as catalog:
        assert catalog.complete
        assert len(catalog) == 3
        catalog.complete = False
        catalog.append(some(4))
        catalog.flush()
    with Catalog.open(path, readonly=True) as catalog:
        assert not catalog.complete
        assert len(catalog) == 4


def test_a_reader_does_not_write(path: Path, catalog: Catalog) -> None:
    catalog.append(some(3))
    catalog.flush()
    with Catalog.open(path, readonly=True) as reader:
        assert len(reader) == 3
        with pytest.raises(CacheError, match="for reading"):
            reader.append(some(BLOCK_ENTRIES, 1000))


def test_views_of_sizes_stay_as_they_were(catalog: Catalog) -> None:
    catalog.append(some(3))
    view = catalog.sizes
    catalog.append(some(500))
    assert view.tolist() == [1000, 1001, 1002]
    assert catalog.sizes[499] == 1499
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1


def test_beyond_the_end(catalog: Catalog) -> None:
    catalog.append(some(2))
    for call in (catalog.entry, catalog.digest):
        with pytest.raises(IndexError):
            call(3)
    with pytest.raises(IndexError):
        catalog.entry(-1)


def test_a_key_costs_little(path: Path, catalog: Catalog) -> None:
    rng = np.random.default_rng(0)
    count = 20_000
    entries = [
        Entry(
            f"recordings/sub-{n // 50:05}/run_{n:08}.npy",
            int(rng.integers(10**6, 10**8)),
            f'"{rng.bytes(16).hex()}"',
            float(1.7e9 + rng.integers(10**7)),
        )
        for n in range(count)
    ]
    catalog.append(entries)
    catalog.flush()
    assert path.stat().st_size / count < 32
    assert catalog.allocated_bytes == path.stat().st_blocks * 512


@given(pages=st.lists(ENTRIES, max_size=5), hashes=st.integers(1, 5))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_keys_are_told_apart_whatever_their_hashes(
    tmp_path: Path, pages: list[list[Entry]], hashes: int
) -> None:
    path = tmp_path / f"{time.monotonic_ns()}.bin"
    expected: dict[tuple[int, str], Entry] = {}
    for page in pages:
        with Catalog.open(path, key_hash=lambda key: len(key) % hashes) as catalog:
            catalog.append(page)
            catalog.append(page[::-1])
            catalog.flush()
        for entry in page:
            expected.setdefault((entry.store, entry.key), entry)
    with Catalog.open(path) as catalog:
        assert catalog.entries(range(len(catalog))) == list(expected.values())


def test_seen_keys_take_little_memory() -> None:
    """Less than thirty bytes each during a listing; a dict would take several times as much."""
    rng = np.random.default_rng(0)
    words = rng.integers(0, 1 << 63, 1 << 17, dtype=np.int64).tolist()
    seen = KeySet(int)
    keys = list(map(str, words))
    tracemalloc.start()
    try:
        for at in range(0, len(keys), 1000):
            assert len(seen.add(keys[at : at + 1000], at, lambda _: [])) <= 1000
        kept, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 14 * len(keys)
    assert most < 60 * len(keys)


@pytest.fixture
def read_offsets(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Where the file was read, in order."""
    pread, found = os.pread, list[int]()

    def counted(descriptor: int, size: int, offset: int) -> bytes:
        found.append(offset)
        return pread(descriptor, size, offset)

    monkeypatch.setattr(os, "pread", counted)
    return found


MANY_BLOCKS = 1600  # more than stay in memory, and fewer than twice as many


@pytest.fixture(scope="module")
def long_catalog(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("long") / "catalog.bin"
    with Catalog.open(path) as catalog:
        catalog.append(some(MANY_BLOCKS * BLOCK_ENTRIES))
        catalog.flush()
    return path


def test_the_blocks_that_were_used_last_stay_in_memory(
    long_catalog: Path, read_offsets: list[int]
) -> None:
    last = [(MANY_BLOCKS - 1 - n) * BLOCK_ENTRIES for n in range(3)]
    with Catalog.open(long_catalog, readonly=True) as catalog:
        catalog.entries(range(0, len(catalog), BLOCK_ENTRIES))
        for ordinal in last:
            catalog.entry(ordinal)
        read_offsets.clear()
        for ordinal in 3 * last:
            catalog.entry(ordinal)
        assert not read_offsets
        catalog.entry(0)
        assert len(read_offsets) == 1, "the block that was used longest ago has gone"


def test_a_look_at_everything_uses_all_that_is_in_memory(
    long_catalog: Path, read_offsets: list[int]
) -> None:
    """Groups of samples are looked up from one end of the listing to the other, again and again."""
    with Catalog.open(long_catalog, readonly=True) as catalog:
        everything = range(0, len(catalog), BLOCK_ENTRIES)
        for _ in range(3):
            read_offsets.clear()
            catalog.entries(everything)
        assert len(read_offsets) <= MANY_BLOCKS - 1024
