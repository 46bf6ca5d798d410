"""Fields whose objects are of formats that cut them in their own ways."""

from __future__ import annotations

import asyncio
import gc
import io
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from growcache.config import Config
from growcache.config_source import SourceConfig
from growcache.config_text import load_config
from growcache.errors import ConfigError, FormatError
from growcache.formats import open_source
from growcache.formats.base import Measure, PartlyReadError, SamplesWithOrigins, Visit
from growcache.sampling.population import stratum_names
from growcache.sampling.sampler_pool import crash_suspects
from growcache.schema import Array
from tests.formats.held import Held

ROWS = 100
SMALL, LARGE = np.arange(ROWS), np.repeat(10 * np.arange(ROWS)[:, None], 64, 1)


def hdf5(rows: int) -> Callable[..., bytes]:
    def write(**arrays: Array) -> bytes:
        h5py = pytest.importorskip("h5py", reason="needs growcache[hdf5]")
        file = io.BytesIO()
        with h5py.File(file, "w") as opened:
            for name, array in arrays.items():
                opened.create_dataset(name, data=array, chunks=(rows, *array.shape[1:]))
        return file.getvalue()

    return write


def parquet(rows: int, gone: int | None = None) -> Callable[..., bytes]:
    """Tables with a given number of rows in a group, and a null in place of one value."""

    def write(**arrays: Array) -> bytes:
        pa = pytest.importorskip("pyarrow", reason="needs growcache[parquet]")
        pq = pytest.importorskip("pyarrow.parquet")
        file = io.BytesIO()
        table = {name: array.tolist() for name, array in arrays.items()}
        for values in table.values():
            if gone is not None:
                values[gone] = None
        # Before pyarrow 26 no null can be written among lists of a fixed length.
        lengths = {n: -1 if gone is not None else a.shape[-1] for n, a in arrays.items()}
        types = {
            name: pa.list_(pa.int64(), lengths[name]) if array.ndim > 1 else pa.int64()
            for name, array in arrays.items()
        }
        columns = {name: pa.array(values, types[name]) for name, values in table.items()}
        # As large as the numbers are, so that the larger table is the larger object.
        plain = {"use_dictionary": False, "compression": "none"}
        pq.write_table(pa.table(columns), file, row_group_size=rows, **plain)
        return file.getvalue()

    return write


def npy(**arrays: Array) -> bytes:
    (array,) = arrays.values()
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def raw(**arrays: Array) -> bytes:
    (array,) = arrays.values()
    return array.astype("<i8").tobytes()


class Pair:
    """Objects of fields x and y, as one source has them.

    Args:
        x: format, options and bytes of the first field's object.
        y: those of the second.
    """

    def __init__(
        self, x: tuple[str, Mapping[str, Any], bytes], y: tuple[str, Mapping[str, Any], bytes]
    ) -> None:
        fields = {
            name: {"url": f"s3://b/{name}_{{k}}", "format": form, "options": options}
            for name, (form, options, _) in (("x", x), ("y", y))
        }
        self.object_format = open_source(SourceConfig.model_validate({"fields": fields}))
        self.x, self.y = Held(x[2], "x_1"), Held(y[2], "y_1")
        self.x.others = [self.y]

    def read(self, part: int = 0, parts: int = 1, **more: Any) -> SamplesWithOrigins:
        visit = Visit(part, parts, more.pop("round", 0), 0, **more)
        return asyncio.run(self.object_format.read(self.x, visit))

    def measure(self) -> Measure:
        return asyncio.run(self.object_format.measure(self.x))


def rows_of(found: SamplesWithOrigins) -> list[int]:
    """The rows that samples are of; every value of both fields says which."""
    for sample, start, stop in found:
        assert stop == start + 1
        assert (np.asarray(sample["x"]) == 10 * start).all()
        assert np.asarray(sample["y"]) == start
    return [start for _, start, _ in found]


AXIS = {"axis": 0}
PAIRS: dict[str, Callable[[], Pair]] = {
    "hdf5 of other chunks": lambda: Pair(
        ("hdf5", AXIS, hdf5(32)(x=LARGE)), ("hdf5", AXIS, hdf5(10)(y=SMALL))
    ),
    "hdf5 and npy": lambda: Pair(
        ("hdf5", AXIS, hdf5(32)(x=LARGE)), ("npy", AXIS, npy(y=SMALL))
    ),
    "npy and hdf5": lambda: Pair(
        ("npy", AXIS, npy(x=LARGE)), ("hdf5", AXIS, hdf5(32)(y=SMALL))
    ),
    "parquet of other row groups": lambda: Pair(
        ("parquet", {}, parquet(32)(x=LARGE)), ("parquet", {}, parquet(7)(y=SMALL))
    ),
    "parquet and raw": lambda: Pair(
        ("parquet", {}, parquet(32)(x=LARGE)), ("raw", {"dtype": "<i8"}, raw(y=SMALL))
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_members_of_other_chunks_are_cut_alike(name: str) -> None:
    pair = PAIRS[name]()
    for parts in (1, 3, 4, 50):
        found = [one for part in range(parts) for one in pair.read(part, parts)]
        assert rows_of(found) == list(range(ROWS))
    assert [len(pair.read(part, 3)) for part in range(3)] == [32, 32, 36]
    assert pair.measure().together in (25, 32)  # of a row group, of a chunk
    for round_ in range(4):
        taken = rows_of(pair.read(1, 2, round=round_, take=5))
        assert len(set(taken)) == 5
        assert min(taken) >= 64


def test_the_chunks_of_the_largest_member_count() -> None:
    pair = Pair(("npy", AXIS, npy(x=LARGE)), ("hdf5", AXIS, hdf5(40)(y=SMALL)))
    assert [len(pair.read(part, 3)) for part in range(3)] == [40, 40, 20]
    small, large = ("hdf5", AXIS, hdf5(50)(x=SMALL)), ("hdf5", AXIS, hdf5(40)(y=LARGE))
    assert [len(Pair(small, large).read(part, 3)) for part in range(3)] == [40, 40, 20]


@pytest.mark.parametrize("nulls", ["drop", "error"])
def test_a_row_without_a_value_in_one_member(nulls: str) -> None:
    options = {"nulls": nulls}
    for y, lost in (
        (("npy", AXIS, npy(y=SMALL)), {7}),
        (("parquet", options, parquet(9, gone=30)(y=SMALL)), {7, 30}),
    ):
        pair = Pair(("parquet", options, parquet(32, gone=7)(x=LARGE)), y)
        if nulls == "drop":
            found = pair.read()
        else:
            with pytest.raises(PartlyReadError, match="column 'x' is null in row 7") as caught:
                pair.read()
            found = caught.value.found
        assert rows_of(found) == sorted(set(range(ROWS)) - lost)
        assert len(pair.read(50, 100)) == 1


@pytest.mark.parametrize("phase", ["zero", "random"])
@pytest.mark.parametrize("edge", ["drop", "pad"])
def test_several_arrays_in_a_window_beside_one(edge: str, phase: str) -> None:
    grid = {"window": 30, "stride": 17, "edge": edge, "phase": phase}
    pair = Pair(
        ("hdf5", grid, hdf5(32)(a=LARGE, b=SMALL.astype("f4"))), ("npy", grid, npy(y=SMALL))
    )
    pair.object_format = open_source(
        SourceConfig.model_validate(
            {
                "fields": {
                    "x": {"url": "s3://b/x_{k}", "options": {**grid, "datasets": ["a", "b"]}},
                    "y": {"url": "s3://b/y_{k}", "format": "npy", "options": grid},
                },
                "format": "hdf5",
            }
        )
    )
    firsts = set()
    for round_ in range(5):
        found = [one for part in range(3) for one in pair.read(part, 3, round=round_)]
        starts = [start for _, start, _ in found]
        firsts.add(starts[0])
        assert starts == list(range(starts[0], ROWS if edge == "pad" else 71, 17))
        for sample, start, stop in found:
            expected = np.zeros(30, np.int64)
            expected[: stop - start] = np.arange(start, stop)
            assert sample.keys() == {"x_a", "x_b", "y"}
            np.testing.assert_array_equal(sample["y"], expected)
            np.testing.assert_array_equal(sample["x_b"], expected)
            np.testing.assert_array_equal(
                sample["x_a"], np.repeat(10 * expected[:, None], 64, 1)
            )
    assert firsts == {0} if phase == "zero" else len(firsts) > 1


def test_members_that_are_cut_otherwise_are_no_samples() -> None:
    x = ("raw", {"dtype": "<i8", "window": 5, "stride": 5, "phase": "zero"}, raw(x=SMALL))
    y = ("raw", {"dtype": "<i8", "window": 4, "stride": 5, "phase": "zero"}, raw(y=SMALL))
    with pytest.raises(FormatError, match="x_1: y has samples of other rows than x; give all"):
        Pair(x, y).read(2, 5)
    shorter = ("npy", AXIS, npy(y=SMALL[:99]))
    with pytest.raises(FormatError, match="x_1: x has 100 samples, y has 99 samples"):
        Pair(("hdf5", AXIS, hdf5(32)(x=LARGE)), shorter).read(0, 50)


@pytest.mark.parametrize(
    ("form", "options", "words"),
    [
        ("tar", {}, "fields.y: objects of format tar are cut by bytes"),
        ("zarr", AXIS, "fields.y: objects of format zarr are chunks, .*its option `beside`"),
    ],
)
def test_formats_that_stand_alone(form: str, options: Mapping[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Pair(("npy", AXIS, b""), (form, options, b""))


def test_the_first_field_says_what_a_label_is() -> None:
    photo = {"url": "s3://b/{c}/{k}.jpg", "format": "image"}
    note = {"url": "s3://b/{c}/{k}.txt", "format": "bytes"}

    def config(**more: Any) -> Config:
        source = {"fields": {"photo": {**photo, **more}, "note": note}}
        return load_config({"source": source, "sampling": {"strata": {"by": "label"}}})

    stratum_names(config())
    with pytest.raises(ConfigError, match=r"or label with source\.format image"):
        stratum_names(config(options={"label": None}))


def test_the_code_of_any_field_may_have_ended_a_sampler() -> None:
    fields = {
        "x": {"url": "s3://b/x_{k}", "format": "mine:read"},
        "y": {"url": "s3://b/y_{k}", "format": "bytes", "options": {"decode": "mine:decode"}},
    }
    told = crash_suspects(load_config({"source": {"fields": fields}}))
    assert told == "; does mine:read or mine:decode crash, or is there too little memory?"
    plain = {"url": "x", "format": "tfrecord", "options": {"decode": "none"}}
    assert crash_suspects(load_config({"source": plain})) == "; is there too little memory?"


@pytest.mark.slow
def test_garbage_that_holds_open_files_disturbs_no_call() -> None:
    make = PAIRS["hdf5 of other chunks"]
    thresholds = gc.get_threshold()
    try:
        for turn in range(100):
            gc.set_threshold(10**9)
            pair, gone = make(), make()
            rows_of([*pair.read(0, 50), *gone.read(0, 4)])
            gone.x.others.append(gone.x)  # a cycle
            gone.object_format.cycle = gone  # type: ignore[attr-defined]
            del gone
            gc.set_threshold(1 + turn % 40, 1, 1)  # collected somewhere on the way
            assert rows_of(pair.read(turn % 50, 50)) == list(
                range(turn % 50 * ROWS // 50, (turn % 50 + 1) * ROWS // 50)
            )
    finally:
        gc.set_threshold(*thresholds)
