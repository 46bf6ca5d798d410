"""Objects and code that are bad: a hole or two clear lines, and nothing else is lost.

What becomes of each is a table in docs/reference/inputs.md, which this module writes
(``pytest --write-tables``) and holds to.
"""

from __future__ import annotations

import os
import re
import shlex
import struct
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from growcache.schema import Array
from tests.sampling.outcomes import BAD, ENDS, HOLE, Outcome, growcache, npy, outcome, said
from tests.sampling.services import run, write_config
from tests.servers import Bucket
from tests.tables import Table

GOOD = 24
MOST = {"max_skipped": 0.9}


@pytest.fixture(scope="module")
def table(write_tables: bool) -> Iterator[Table]:
    with BAD.open(writes=write_tables) as opened:
        yield opened


def values(number: int) -> Array:
    return np.random.default_rng(number).random((4, 4), np.float32)


def header(text: str) -> bytes:
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode() + bytes(64)


class Payload:
    """Runs a program where it is unpickled."""

    def __init__(self, ran: Path) -> None:
        self.ran = ran

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {shlex.quote(str(self.ran))}",)


def bad_arrays(ran: Path) -> dict[str, bytes]:
    """Return objects by the row of the table that they are for."""
    claims = "{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,)}\n"
    return {
        "an object that is cut off": npy(values(1))[:-10],
        "an object of another format": b"PK\x03\x04 is a zip archive",
        "an object of another shape": npy(np.zeros((4, 5), np.float32)),
        "an object with another number of dimensions": npy(np.zeros(16, np.float32)),
        "an object of another dtype": npy(np.zeros((4, 4), np.int16)),
        "an array of Python objects (pickle)": npy(
            np.array([Payload(ran)], object), pickled=True
        ),
        "an array of records (structured dtype)": npy(np.zeros(4, [("a", "<f4")])),
        "an array of text": npy(np.array(["a", "b"])),
        "a header that claims 10^12 elements": header(claims),
    }


def named(number: int) -> str:
    """A short name that says nothing."""
    return f"{number:02d}.npy"


@pytest.fixture
def tmp_path(short_path: Path) -> Path:
    """A short one: the messages of this table hold paths."""
    return short_path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder of good objects, as many as `GOOD`, with numbers from 10."""
    (tmp_path / "data").mkdir()
    for number in range(10, 10 + GOOD):
        (tmp_path / "data" / named(number)).write_bytes(npy(values(number)))
    return tmp_path / "data"


@pytest.fixture
def as_a_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Permissions apply to what is run, also where the tests are root's."""
    if os.geteuid() == 0:
        words = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", sys.executable]
        wrapped = tmp_path / "python"
        wrapped.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        wrapped.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(wrapped))


def about(key: str, found: Outcome, here: Path) -> str:
    """The reason of a hole as it stands in the table, where all objects are called a."""
    name = Path(key).stem
    return said(found.holes[key].replace(f"/{name}.", "/a."), here)


def all_good(found: Outcome, data: Path, but: set[int] | None = None) -> None:
    """Every good object is cached, as it is."""
    expected = set(range(10, 10 + GOOD)) - (but or set())
    keys = {str(data / named(number)): number for number in expected}
    assert found.samples.keys() == keys.keys()
    for key, (sample,) in found.samples.items():
        np.testing.assert_array_equal(sample["x"], values(keys[key]))


@pytest.mark.usefixtures("as_a_user")
def test_objects_that_cannot_be_used(data: Path, table: Table) -> None:
    here, ran = data.parent, data.parent / "ran"
    rows: dict[str, str] = {}
    for number, (row, content) in enumerate(bad_arrays(ran).items(), 40):
        (data / named(number)).write_bytes(content)
        rows[str(data / named(number))] = row
    (data / "79.npy").touch()
    (data / "80.npy").mkdir()
    (data / "81.npy").symlink_to("nothing")
    os.mkfifo(data / "82.npy")
    (data / os.fsdecode(b"caf\xe9.npy")).write_bytes(npy(values(0)))
    config = write_config(here / "c.yaml", f"{data}/*.npy", sampling=MOST)
    exits, warning = run(config, "--samples", "4")  # lists all, and reads a few
    assert exits == 0
    odd_name, empty = warning.splitlines(keepends=True)
    left_out = "left out of the listing"
    table.record("a file's name that is no UTF-8", left_out, said(odd_name, here))
    table.record("an empty object (0 bytes)", left_out, said(empty, here))
    first = outcome(here / "c")
    left = [n for n in range(10, 10 + GOOD) if str(data / named(n)) not in first.samples]
    deleted, rewritten, forbidden = (data / named(number) for number in left[:3])
    deleted.unlink()
    rewritten.write_bytes(npy(np.zeros((9, 9), np.float32)))
    forbidden.chmod(0)
    rows[str(deleted)] = "an object deleted between listing and reading"
    rows[str(rewritten)] = "an object rewritten between listing and reading"
    rows[str(forbidden)] = "an object without permission"
    exits, notice = run(config, "--until-full")
    assert exits == 0
    # The report may take so long that nothing else is left while that one is tried again.
    assert all(f"{forbidden} may not be read" in line for line in notice.splitlines())
    found = outcome(here / "c")
    assert found.holes.keys() == rows.keys()
    assert not ran.exists()
    all_good(found, data, but=set(left[:3]))
    assert (found.status.samples, found.status.complete) == (GOOD - 3, True)
    for key, row in rows.items():
        table.record(row, HOLE, about(key, found, here))
    table.record(
        "a folder, a named pipe, a link to nothing, of the objects' name",
        "left out of the listing",
        "",
    )


@pytest.mark.slow
def test_objects_of_a_bucket_that_cannot_be_used(
    tmp_path: Path, bucket: Bucket, table: Table
) -> None:
    long = f"{'long ' * 203}name.npy"
    named = {
        "tab\tand \x1b[31mred.npy": "a name with control characters",
        long: "a name of a thousand characters",
    }
    for key in named:
        bucket.put(key, b"text")
    for number in range(10, 30):
        bucket.put(f"{number}.npy", npy(values(number)))
    source = {"url": bucket.url("**"), "storage_options": bucket.storage_options}
    config = write_config(tmp_path / "c.yaml", "", source=source, sampling=MOST)
    assert run(config, "--samples", "4") == (0, "")
    first = outcome(tmp_path / "c")
    deleted, rewritten, *_ = (
        f"{n}.npy" for n in range(10, 30) if f"{n}.npy" not in first.samples
    )
    bucket.delete(deleted)
    bucket.put(rewritten, npy(values(0)))  # as long as before: only the ETag differs
    assert run(config, "--until-full") == (0, "")
    for key in named:
        bucket.delete(key)  # one by one: no list of keys, which is XML, can name an escape
    found = outcome(tmp_path / "c")
    assert found.holes.keys() == {*named, deleted, rewritten}
    gone = f"s3://{bucket.name}/{deleted} does not exist (404 NoSuchKey) (GC210)"
    assert found.holes[deleted] == gone
    assert "was rewritten since it was listed (412" in found.holes[rewritten]
    assert len(found.samples) == 18
    for key, (sample,) in found.samples.items():
        np.testing.assert_array_equal(sample["x"], values(int(key[:2])))
    for key, row in named.items():
        assert found.holes[key].isprintable()
        table.record(row, HOLE, said(found.holes[key], tmp_path))


def png(width: int, height: int, data: bytes) -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        crc = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", crc)

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(data)), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def test_images_that_are_none(tmp_path: Path, table: Table) -> None:
    data = tmp_path / "data"
    data.mkdir()
    good = png(4, 4, (b"\x00" + bytes(range(12))) * 4)
    rows = {
        "no image under the name of one": b"<html>404 Not Found</html>",
        "an image that is cut off": good[:60],
        "an image that claims 10^10 pixels": png(100_000, 100_000, bytes(64)),
    }
    for number, content in enumerate([good, good, *rows.values()]):
        (data / f"{number}.png").write_bytes(content)
    source = {"format": "image", "options": {"label": "none", "decode": True}}
    config = write_config(
        tmp_path / "c.yaml", "", source={"url": f"{data}/*.png", **source}, sampling=MOST
    )
    assert run(config, "--until-full") == (0, "")
    found = outcome(tmp_path / "c")
    assert sorted(found.samples) == [f"{data}/0.png", f"{data}/1.png"]
    for (sample,) in found.samples.values():
        assert sample["image"].tolist() == [np.arange(12).reshape(4, 3).tolist()] * 4
    for number, row in enumerate(rows, 2):
        table.record(row, HOLE, about(f"{data}/{number}.png", found, tmp_path))
    assert len(found.holes) == 3


TRANSFORMS = """
import sys
import numpy as np

def odd(sample, origin):
    match origin.key[-6:-4]:
        case "20":
            raise ValueError("channel 7 is missing")
        case "21":
            sys.exit(3)
        case "22":
            return 7
        case "23":
            return {}
        case "24":
            return {**sample, "y": 1}
        case "25":
            return {"x": np.array([None])}
        case "26":
            return {"x": "\\ud800"}
        case "27":
            return None
    return sample
"""
ROWS = {
    20: "a transform that raises",
    21: "a transform that calls `exit()`",
    22: "a transform that returns nonsense",
    23: "a transform that returns an empty dict",
    24: "a transform that returns another schema",
    25: "a transform that returns objects",
    26: "a transform that returns broken Unicode",
}


@pytest.fixture
def importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose modules samplers can import."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path.cwd())]))
    return tmp_path


def test_transforms_that_go_wrong(importable: Path, data: Path, table: Table) -> None:
    (importable / "mine.py").write_text(TRANSFORMS)
    sampling = {"transform": "mine:odd", **MOST}
    config = write_config(importable / "c.yaml", f"{data}/*.npy", sampling=sampling)
    assert run(config, "--until-full") == (0, "")
    found = outcome(importable / "c")
    all_good(found, data, but={*ROWS, 27})
    for number, row in ROWS.items():
        table.record(row, HOLE, about(str(data / named(number)), found, importable))
    assert len(found.holes) == len(ROWS)
    table.record("a transform that returns None", "passed over; all others are cached", "")


READS = """
import io
import numpy as np

def read(object, rng):
    number = object.key[-6:-4]
    if number == "20":
        raise ValueError("channel 7 is missing")
    if number == "21":
        yield {"x": np.zeros((4, 4), np.float32)}
        raise ValueError("the second one is broken")
    if number == "22":
        yield "x"
    if number != "23":
        yield {"x": np.load(io.BytesIO(object.read()))}
"""


def test_a_read_that_goes_wrong(importable: Path, data: Path, table: Table) -> None:
    (importable / "mine.py").write_text(READS)
    source = {"url": f"{data}/*.npy", "format": "mine:read"}
    config = write_config(importable / "c.yaml", "", source=source, sampling=MOST)
    assert run(config, "--until-full") == (0, "")
    found = outcome(importable / "c")
    all_good(found, data, but={20, 21, 22, 23})
    for number, row in (
        (20, "a `read` that raises"),
        (21, "a `read` that raises after its first sample"),
        (22, "a `read` that returns nonsense"),
    ):
        table.record(row, HOLE, about(str(data / named(number)), found, importable))
    assert len(found.holes) == 3
    table.record("a `read` that yields no sample", "passed over; all others are cached", "")


DRAWS = """
import numpy as np

def sample(store, rng):
    values = np.load(store.open(f"{rng.integers(10, 30)}.npy"))
    return {"x": values[: rng.integers(5)]} if rng.random() < 0.2 else None
"""


def test_a_sample_function_may_return_none(importable: Path, data: Path, table: Table) -> None:
    (importable / "mine.py").write_text(DRAWS)
    source = {"url": f"{data}/", "format": "mine:sample"}
    config = write_config(importable / "c.yaml", "", source=source)
    assert run(config, "--samples", "10") == (0, "")
    found = outcome(importable / "c")
    known = {values(n)[:rows].tobytes() for n in range(10, 30) for rows in range(5)}
    samples = [sample["x"] for one in found.samples.values() for sample in one]
    assert len(samples) >= 10
    assert {sample.tobytes() for sample in samples} <= known
    assert len({len(sample) for sample in samples}) > 1  # ragged, as the first draws showed
    assert (found.status.holes, found.status.population) == (0, None)
    assert "unknown, because your function draws" in growcache("status", importable / "c")
    table.record(
        "a `sample` that returns None now and then", "passed over; it is asked again", ""
    )


ENDINGS = """
import os
import time
from pathlib import Path

def raises(sample):
    raise ValueError("no channel")

def nothing(sample):
    return None

def kills(sample, origin):
    if origin.key.endswith("20.npy"):
        os._exit(11)
    return sample

def read(object, rng):
    if object.key.endswith("20.npy"):
        os.kill(os.getpid(), 15)
    yield {"n": int(object.key[-6:-4])}

def slow(sample, origin, flag):
    if origin.key.endswith("20.npy") and not (flag and os.path.exists(flag)):
        if flag:
            Path(flag).touch()
        time.sleep(60)
    return sample
"""
ENDING: dict[str, dict[str, Any]] = {
    "a transform that raises for all": {"sampling": {"transform": "mine:raises"}},
    "a transform that returns None for all": {"sampling": {"transform": "mine:nothing"}},
    "a transform that kills its process": {"sampling": {"transform": "mine:kills"}},
    "a `read` that kills its process": {"source": {"format": "mine:read"}},
    "objects of which no two are alike": {},
    "rows of length zero, one by one": {"source": {"options": {"axis": 0}}},
    "too many holes": {},
    "a transform that takes longer again and again": {
        "sampling": {
            "transform": "mine:slow",
            "transform_options": {"flag": ""},
            "timeout_seconds": 1,
        }
    },
}
LONG = (
    "a transform that takes longer again and again",
    "a transform that kills its process",
    "a `read` that kills its process",
)


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=pytest.mark.slow if row in LONG else ()) for row in ENDING],
)
def test_what_ends_the_service(row: str, importable: Path, data: Path, table: Table) -> None:
    (importable / "mine.py").write_text(ENDINGS)
    if row == "objects of which no two are alike":
        for number in range(11, 10 + GOOD, 2):
            (data / named(number)).write_bytes(npy(values(number).astype("<f8")))
    if row == "rows of length zero, one by one":
        for number in range(10, 10 + GOOD):
            (data / named(number)).write_bytes(npy(np.zeros((4, 0), np.float32)))
    if row == "too many holes":
        (data / "40.npy").write_bytes(b"text")
    config = write_config(importable / "c.yaml", f"{data}/*.npy", **ENDING[row])
    exits, errors = run(config, "--until-full")
    assert exits == 1, errors
    assert len(errors.splitlines()) == 1, errors
    found = outcome(importable / "c")
    reason = errors.removeprefix("growcache: ").partition("; growcache explain")[0]
    assert found.status.last_errors[-1] == f"{reason})"
    for key, (sample,) in found.samples.items():
        number = int(key[-6:-4])
        expected = {"n": number} if "read" in row else {"x": values(number)}
        np.testing.assert_equal(sample, expected)
    table.record(row, ENDS.format(exits), steady(errors, importable))


@pytest.mark.slow
def test_what_is_slow_once_costs_a_restart(importable: Path, data: Path, table: Table) -> None:
    (importable / "mine.py").write_text(ENDINGS)
    sampling = {
        "transform": "mine:slow",
        "transform_options": {"flag": str(importable / "flag")},
        "timeout_seconds": 1,
    }
    config = write_config(importable / "c.yaml", f"{data}/*.npy", sampling=sampling)
    assert run(config, "--until-full") == (0, "")
    found = outcome(importable / "c")
    all_good(found, data)
    assert (found.status.restarts >= 1, found.status.holes) == (True, 0)
    (why,) = (error for error in found.status.last_errors if "in one call" in error)
    table.record(
        "a transform that takes longer than the timeout",
        "its sampler is restarted",
        said(why, importable),
    )


def steady(errors: str, here: Path) -> str:
    """The message, whichever group and object it was about."""
    text = re.sub(r"died on group \d+", "died on group 3", errors)
    text = re.sub(r"/\d\d\.npy", "/a.npy", text)
    return said(text, here)
