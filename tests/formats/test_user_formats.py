"""Formats of the user's own: read(object, rng) and sample(store, rng)."""

from __future__ import annotations

import asyncio
import io
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from growcache.config_source import SourceConfig
from growcache.errors import (
    ConfigError,
    FormatError,
    GrowcacheError,
    ObjectMissingError,
    TransientStoreError,
)
from growcache.formats import base, check_format, open_format, user
from growcache.formats.base import Visit, endless_entry
from growcache.formats.items import UserCall, UserThreads
from growcache.store.contract import StoredObject
from growcache.store.opening import open_store
from tests.formats.held import SOURCE, Held, visited

MODULE = """
import io
import itertools
import time
import numpy as np

def rows(object, rng):
    values = np.frombuffer(object.read(), "u1")
    for value in rng.permutation(values):
        yield {"x": np.int64(value), "key": object.key, "size": object.size}

def listed(object):
    return [{"x": np.frombuffer(object.read(2, 4), "u1")}]

def through_file(object, rng, step=3):
    with object.open() as file:
        while part := file.read(step):
            yield {"x": part}

def halves(object):
    file = object.open()
    file.seek(-4, io.SEEK_END)
    yield {"x": file.read()}
    file.seek(0)
    yield {"x": file.read(4)}

def reused(object):
    out = np.zeros(3)
    for value in range(4):
        out[:] = value
        yield {"x": out}

def fails(object):
    yield {"x": np.zeros(3)}
    raise ValueError("bad trailer")

def fails_at_once(object):
    raise ValueError("bad header")

def one_dict(object):
    return {"x": np.zeros(3)}

def number(object):
    return 7

def nothing(object):
    return None

def yields_none(object):
    yield None

def endless(object, rng):
    for value in itertools.count():
        yield {"x": np.zeros(100_000)}

def endless_and_tiny(object):
    while True:
        yield {"x": b""}

def swallows(object):
    try:
        return [{"x": np.int64(len(object.read()))}]
    except OSError:
        return [{"x": np.int64(-1)}]

def slow(object):
    for value in range(10_000):
        time.sleep(0.01)
        progress.append(value)
        yield {"x": np.int64(value)}

progress = []

class Scaled:
    made = 0
    def __init__(self, by, offset=0):
        Scaled.made += 1
        self.by, self.offset = by, offset
    def __call__(self, object, rng):
        values = np.frombuffer(object.read(), "u1")
        return ({"x": np.int64(value) * self.by + self.offset} for value in values)

def draw(store, rng):
    key = "abc"[rng.integers(3)]
    at = int(rng.integers(10))
    return {"x": np.frombuffer(store.read(key, at, at + 4), "u1"), "url": store.url}

def opens(store, rng):
    with store.open("b") as file:
        file.seek(2)
        return {"x": file.read(3), "anon": np.bool_(store.storage_options["anon"])}

class Keeps:
    def __init__(self):
        self.file = None
    def __call__(self, store):
        self.file = self.file or store.open("a")
        self.file.seek(0)
        return {"x": self.file.read()}

def rejects(store, rng):
    return {"x": rng.random()} if rng.random() < 0.5 else None

def lost(store):
    return {"x": store.read("zzz")}

def both(store, object):
    return {}

def neither(rng):
    return {}

def positional(object, /):
    return []


def named(object):
    with object.open() as file:
        file.seek(-2, 2)
        yield {"name": file.name, "end": file.read()}
"""

BESIDE = {key: bytes(range(n, n + 20)) for n, key in enumerate("abc")}


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "user_formats.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "user_formats", raising=False)


def opened(name: str, **options: Any) -> Any:
    return open_format(f"user_formats:{name}", options)


def line(text: str) -> int:
    return next(n for n, found in enumerate(MODULE.splitlines(), 1) if text in found)


def test_what_is_yielded_are_the_samples_of_one_part() -> None:
    object_format = opened("rows")
    assert (object_format.ranged, object_format.listed) == (False, True)
    held = Held(bytes(range(50)), "a/b")
    found = visited(object_format, held)
    assert [(start, stop) for _, start, stop in found] == [(n, n + 1) for n in range(50)]
    assert sorted(int(sample["x"]) for sample, _, _ in found) == list(range(50))
    assert {(sample["key"], sample["size"].item()) for sample, _, _ in found} == {("a/b", 50)}
    measure = asyncio.run(object_format.measure(held))
    assert (measure.samples, measure.stride_bytes) == (50, 1)


def test_randomness_depends_on_seed_round_and_key() -> None:
    object_format = opened("rows")

    def order(**more: Any) -> list[int]:
        held = Held(bytes(range(50)), more.pop("key", "k"))
        return [int(sample["x"]) for sample, _, _ in visited(object_format, held, **more)]

    assert order() == order()
    orders = [order(), order(seed=1), order(round=1), order(key="other")]
    assert len({tuple(o) for o in orders}) == 4


def test_lists_and_ranges() -> None:
    held = Held(bytes(range(50)))
    ((sample, _, _),) = visited(opened("listed"), held)
    assert sample["x"].tolist() == [2, 3]
    assert held.asked == [(2, 4)]


def test_some_at_random_where_objects_weigh_alike() -> None:
    object_format = opened("through_file")
    held = Held(bytes(range(60)))
    some = visited(object_format, held, take=5)
    starts = [start for _, start, _ in some]
    assert len(starts) == 5
    assert starts == sorted(set(starts))
    assert [sample["x"] for sample, _, _ in some] == [
        bytes(range(3 * s, 3 * s + 3)) for s in starts
    ]
    assert [a for _, a, _ in visited(object_format, held, take=5, round=1)] != starts
    assert len(visited(object_format, held, take=500)) == 20


@pytest.mark.parametrize("step", [1, 3, 1000, 70_000, 10_000_000])
def test_a_file_reads_the_object_and_few_requests_are_made(step: int) -> None:
    data = np.random.default_rng(0).bytes(300_000)
    held = Held(data)
    if step == 1:
        data = held.data = data[:5000]
        held.entry = Held(data).entry
    found = visited(opened("through_file", step=step), held)
    assert b"".join(sample["x"] for sample, _, _ in found) == data
    assert len(held.asked) <= 4
    ends = [stop for _, stop in held.asked]
    assert [start for start, _ in held.asked] == [0, *ends[:-1]]  # nothing twice


def test_a_file_can_be_positioned() -> None:
    held = Held(bytes(range(100)))
    assert [sample["x"] for sample, _, _ in visited(opened("halves"), held)] == [
        bytes(range(96, 100)),
        bytes(range(4)),
    ]


def test_a_file_is_one_that_libraries_read() -> None:
    file = io.BytesIO()
    np.savez(file, x=np.arange(1000), y=np.ones(3))
    held = Held(file.getvalue())

    async def compare() -> None:
        threads = UserThreads()

        def work(call: UserCall) -> None:
            with user.UserObject(call, held).open() as opened_file:
                assert (opened_file.readable(), opened_file.writable()) == (True, False)
                with np.load(opened_file) as arrays:
                    assert arrays["x"].sum() == 499_500
                    assert arrays["y"].tolist() == [1, 1, 1]
                with pytest.raises(ValueError, match="position of at least 0"):
                    opened_file.seek(-1)

        await threads.run(work)

    asyncio.run(compare())


def test_an_array_that_is_filled_anew_each_time_is_copied() -> None:
    found = visited(opened("reused"), Held(b""))
    assert [sample["x"].tolist() for sample, _, _ in found] == [[n] * 3 for n in range(4)]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fails", f"raised ValueError: bad trailer at user_formats.py:{line('bad trailer')} on a/b"),
        ("fails_at_once", f"raised ValueError: bad header at user_formats.py:{line('bad header')} on a/b"),
        ("one_dict", "on a/b: expected an iterable of samples .*, found dict"),
        ("number", "on a/b: expected an iterable of samples .*, found int"),
        ("nothing", "on a/b: expected an iterable of samples .*, found NoneType"),
        ("yields_none", "on a/b: expected a dict of arrays, found NoneType"),
    ],
)  # fmt: skip
def test_what_goes_wrong_is_named_with_object_and_line(name: str, words: str) -> None:
    with pytest.raises(FormatError, match=f"^user_formats:{name} {words}") as caught:
        visited(opened(name), Held(b"12345678", "a/b"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["endless", "endless_and_tiny"])
def test_a_generator_without_end_is_ended(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user, "MOST_VISIT_BYTES", 10_000_000)
    with pytest.raises(FormatError, match=r"at most 10,000,000 bytes, .* does it end"):
        visited(opened(name), Held(b"1"))


def test_a_transient_failure_is_one_even_if_the_users_code_swallows_it() -> None:
    object_format = opened("swallows")
    held = Held(b"12345", failures=[TransientStoreError("503")])
    with pytest.raises(TransientStoreError, match="503"):
        visited(object_format, held)
    assert int(visited(object_format, held)[0][0]["x"]) == 5
    missing = Held(b"12345", failures=[ObjectMissingError("gone")])
    assert int(visited(object_format, missing)[0][0]["x"]) == -1


def test_a_transient_failure_in_the_users_code_is_no_hole() -> None:
    held = Held(b"12345", failures=[TransientStoreError("503")])
    with pytest.raises(TransientStoreError, match="503"):
        visited(opened("rows"), held)


def test_many_objects_are_read_at_once() -> None:
    object_format = opened("rows")
    arrived: list[str] = []

    class Meeting(Held):
        async def read(self, start: int = 0, stop: int | None = None) -> bytes:
            arrived.append(self.entry.key)
            while len(arrived) < 20:
                await asyncio.sleep(0.001)
            return self.data

    async def all_of_them() -> list[Any]:
        objects = [Meeting(bytes([n]), str(n)) for n in range(20)]
        visits = (object_format.read(held, Visit(0, 1, 0, 0)) for held in objects)
        return list(await asyncio.gather(*visits))

    found = asyncio.run(all_of_them())
    assert [int(rows[0][0]["x"]) for rows in found] == list(range(20))


def test_code_whose_group_is_given_up_ends_soon() -> None:
    object_format = opened("slow")

    async def given_up() -> int:
        task = asyncio.create_task(object_format.read(Held(b"1"), Visit(0, 1, 0, 0)))
        while not (progress := sys.modules["user_formats"].progress):
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.1)
        before = len(progress)
        await asyncio.sleep(0.1)
        return len(progress) - before

    assert asyncio.run(given_up()) == 0


def test_a_class_is_made_once_with_the_options() -> None:
    object_format = opened("Scaled", by=10, offset=1)
    for _ in range(2):
        found = visited(object_format, Held(bytes([1, 2])))
        assert [int(sample["x"]) for sample, _, _ in found] == [11, 21]
    assert sys.modules["user_formats"].Scaled.made == 1


def test_samples_drawn_by_the_user() -> None:
    object_format = opened("draw")
    assert (object_format.ranged, object_format.listed) == (True, False)
    held = Held(b"", "user_formats:draw", BESIDE)
    parts = asyncio.run(object_format.measure(held)).samples
    assert parts == endless_entry("f").size == base.ENDLESS_PARTS
    found = [visited(object_format, held, part, parts)[0] for part in (0, 1, 2, parts - 1)]
    assert [(start, stop) for _, start, stop in found] == [
        (n, n + 1) for n in (0, 1, 2, parts - 1)
    ]
    assert {sample["url"] for sample, _, _ in found} == set(SOURCE.url)
    assert len({tuple(sample["x"]) for sample, _, _ in found}) > 1
    again = visited(object_format, held, 2, parts)[0][0]["x"]
    np.testing.assert_array_equal(again, found[2][0]["x"])
    assert sorted(held.found) == sorted(set(held.found))  # each object is looked for once


def test_several_draws_of_one_visit() -> None:
    object_format = opened("draw")
    held = Held(b"", "f", BESIDE)
    found = visited(object_format, held, 5, base.ENDLESS_PARTS // 16)
    assert [start for _, start, _ in found] == list(range(80, 96))
    single = visited(object_format, held, 83, base.ENDLESS_PARTS)[0]
    np.testing.assert_array_equal(single[0]["x"], found[3][0]["x"])


def test_a_draw_may_open_files_keep_them_and_pass_over() -> None:
    held = Held(b"", "f", BESIDE)
    sample = visited(opened("opens"), held, 0, base.ENDLESS_PARTS)[0][0]
    assert (sample["x"], bool(sample["anon"])) == (BESIDE["b"][2:5], True)
    keeps = opened("Keeps")
    for part in range(3):
        assert visited(keeps, held, part, base.ENDLESS_PARTS)[0][0]["x"] == BESIDE["a"]
    found = visited(opened("rejects"), held, 0, base.ENDLESS_PARTS // 100)
    assert 20 < len(found) < 80


def test_an_opened_object_has_its_name_and_can_be_sought() -> None:
    ((sample, _, _),) = visited(opened("named"), Held(b"0123", "folder/k.wav"))
    assert sample == {"name": "folder/k.wav", "end": b"23"}


def test_a_draw_that_fails_is_named_with_its_line() -> None:
    where = rf"user_formats.py:{line('zzz')} on draw 3$"
    with pytest.raises(
        FormatError, match=f"(?m)ObjectMissingError: zzz does not exist at {where}"
    ):
        visited(opened("lost"), Held(b"", "f", BESIDE), 3, base.ENDLESS_PARTS)


def test_objects_are_found_by_key_below_a_folder_and_by_path(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "b").write_bytes(b"0123456")
    source = SourceConfig(url=(f"{tmp_path}/data/",), storage_options={"anon": True})
    store = open_store(source, timeout_seconds=1)
    reader = StoredObject(store, endless_entry("f"))
    found = asyncio.run(opened("opens").read(reader, Visit(0, base.ENDLESS_PARTS, 0, 0)))
    assert found[0][0]["x"] == b"234"
    by_path = asyncio.run(store.find(f"{tmp_path}/data/b"))
    assert (by_path.key, by_path.size) == (f"{tmp_path}/data/b", 7)
    with pytest.raises(ObjectMissingError, match="does not exist"):
        asyncio.run(store.find("none"))
    asyncio.run(store.close())


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("both", {}, "must take object .* or store .*, found"),
        ("neither", {}, "must take object .* or store .*, found"),
        ("positional", {}, "of which object cannot be given"),
        ("absent", {}, "has no absent"),
        ("row", {}, "did you mean rows?"),
        ("rows", {"b": 1}, "source.options: user_formats:rows takes no option 'b'"),
        ("Scaled", {}, "source.options do not fit user_formats:Scaled: TypeError"),
        ("Scaled", {"bye": 1}, "source.options do not fit"),
        ("through_file", {"stepp": 1}, "did you mean step?"),
        ("progress", {}, "is not callable"),
    ],
)
def test_what_cannot_be_meant(name: str, options: dict[str, Any], words: str) -> None:
    check_format(f"user_formats:{name}", options)  # which runs no code of the user's
    with pytest.raises(ConfigError, match=words):
        open_format(f"user_formats:{name}", options)


def test_the_digest_follows_the_source(tmp_path: Path) -> None:
    before = opened("rows").code_digest
    assert before == opened("draw").code_digest
    sys.modules.pop("user_formats")
    (tmp_path / "user_formats.py").write_text(MODULE + "changed = True\n")
    assert opened("rows").code_digest != before


def test_errors_are_growcaches_own() -> None:
    for name in ("fails", "one_dict", "yields_none"):
        started = time.monotonic()
        with pytest.raises(GrowcacheError):
            visited(opened(name), Held(b"1"))
        assert time.monotonic() - started < 25
