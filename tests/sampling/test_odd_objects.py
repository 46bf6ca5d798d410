"""Objects that are odd but legal: cached as they are, value by value.

What arrives is a table in docs/reference/inputs.md, which this module writes
(``pytest --write-tables``) and holds to.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from growcache.numpy import EpochLoader
from growcache.schema import Array
from tests.sampling.outcomes import ODD, Outcome, npy, outcome
from tests.sampling.services import run, status, write_config
from tests.servers import Bucket
from tests.tables import Table, code


@pytest.fixture(scope="module")
def table(write_tables: bool) -> Iterator[Table]:
    with ODD.open(writes=write_tables) as opened:
        yield opened


def cached(
    folder: Path, objects: Mapping[str, bytes], skipped: float = 0, **source: Any
) -> Outcome:
    """Run the service over files, and return what it cached."""
    (folder / "data").mkdir()
    for name, content in objects.items():
        (folder / "data" / name).write_bytes(content)
    source = {"url": f"{folder}/data/", **source}
    sampling = {"max_skipped": skipped}
    config = write_config(folder / "c.yaml", "", source=source, sampling=sampling)
    assert run(config, "--until-full") == (0, "")
    found = outcome(folder / "c")
    prefix = f"{folder}/data/"
    samples = {key.removeprefix(prefix): value for key, value in found.samples.items()}
    holes = {key.removeprefix(prefix): why for key, why in found.holes.items()}
    return Outcome(samples, holes, found.status)


def batches(cache: Path, **options: Any) -> Any:
    """The arrays of one batch with every sample, by a loader in the order of the cache."""
    samples = status(cache).samples
    loader = EpochLoader(
        cache, batch_size=samples, min_samples=samples, shuffle=False, **options
    )
    (batch,) = loader
    loader.close()
    return batch


def arrives(values: Array) -> str:
    """A sample's array, as the table has it."""
    return code(f"x: {values.dtype.name}{list(values.shape)}")


def test_every_way_to_write_the_same_array(tmp_path: Path, table: Table) -> None:
    values = {row: np.random.default_rng(n).random((3, 4), "<f4") for n, row in enumerate(WAYS)}
    objects = {row: way(values[row]) for row, way in WAYS.items()}
    found = cached(tmp_path, objects)
    expected = {values[row].tobytes() for row in WAYS}
    batch = batches(tmp_path / "c")["x"]
    assert {sample.tobytes() for sample in batch} == expected
    for row in WAYS:
        (sample,) = found.samples[row]
        np.testing.assert_array_equal(sample["x"], values[row])
        assert sample["x"].dtype.str == batch.dtype.str == "<f4"
        table.record(row.replace("npy", "`.npy`"), arrives(sample["x"]))


def version(number: int, values: Array) -> bytes:
    """An object with a header of that version."""
    file = io.BytesIO()
    write: Any = np.lib.format.write_array
    write(file, values, (number, 0))
    return file.getvalue()


WAYS: dict[str, Callable[[Array], bytes]] = {
    "big-endian": lambda values: npy(values.astype(">f4")),
    "Fortran order": lambda values: npy(np.asfortranarray(values)),
    "npy header version 2": lambda values: version(2, values),
    "npy header version 3": lambda values: version(3, values),
}
KINDS = {
    "a 0-d array": ("<f8", ()),
    "a dimension of length zero": ("<f4", (0, 5)),
    "bool": ("?", (3,)),
    "float16": ("<f2", (3,)),
    "complex64": ("<c8", (3,)),
}


@pytest.mark.parametrize("row", KINDS)
def test_every_kind_of_number(row: str, tmp_path: Path, table: Table) -> None:
    dtype, shape = KINDS[row]
    size = int(np.prod(shape))
    raw = np.random.default_rng(0).integers(0, 60_000, (6, size))
    many = raw % 3 == 0 if dtype == "?" else raw + 1j * raw[::-1] if dtype == "<c8" else raw
    arrays = [one.astype(dtype).reshape(shape) for one in many]
    cached(tmp_path, {f"{n}.npy": npy(array) for n, array in enumerate(arrays)})
    batch = batches(tmp_path / "c")["x"]
    native = np.dtype(dtype).newbyteorder("<")
    assert (batch.dtype, batch.shape) == (native, (6, *shape))
    assert sorted(one.tobytes() for one in batch) == sorted(
        array.astype(native).tobytes() for array in arrays
    )
    table.record(row, arrives(batch[0]))


def test_rows_that_are_none(tmp_path: Path, table: Table) -> None:
    full = [np.random.default_rng(n).random((3, 4), np.float32) for n in range(2)]
    objects = {"0.npy": full[0], "1.npy": np.zeros((0, 4), np.float32), "2.npy": full[1]}
    found = cached(tmp_path, {k: npy(v) for k, v in objects.items()}, options={"axis": 0})
    assert (found.status.samples, found.holes) == (6, {})
    batch = batches(tmp_path / "c")["x"]
    rows = {row.tobytes() for array in full for row in array}
    assert {row.tobytes() for row in batch} == rows
    table.record("an object without rows among others", arrives(batch[0]))


def test_bytes_of_any_kind(tmp_path: Path, table: Table) -> None:
    objects = {"empty": b"", "all": bytes(range(256)), "more": b"\0\n"}
    found = cached(tmp_path, objects, format="bytes")
    assert {key: one["data"] for key, (one,) in found.samples.items()} == objects
    batch = batches(tmp_path / "c", ragged="list")["data"]
    assert sorted(batch) == sorted(objects.values())
    table.record("an empty object, as bytes", code("data: b''"))
    table.record("every byte there is", code("data: bytes") + ", as they are")


def test_shapes_that_vary(tmp_path: Path, table: Table) -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.random((rows, 4), np.float32) for rows in (3, 5, 0, 1, 8, 2, 2, 7, 4, 6)]
    found = cached(tmp_path, {f"{n}.npy": npy(array) for n, array in enumerate(arrays)})
    for number, array in enumerate(arrays):
        np.testing.assert_array_equal(found.samples[f"{number}.npy"][0]["x"], array)
    batch = batches(tmp_path / "c")
    cut = np.split(batch["x"], batch["x_offsets"][1:-1])
    assert sorted(one.tobytes() for one in cut) == sorted(one.tobytes() for one in arrays)
    assert {one.shape[1:] for one in cut} == {(4,)}
    table.record("shapes that vary", code("x: float32[?, 4]") + ", with `x_offsets`")


def test_few_of_another_shape(tmp_path: Path, table: Table) -> None:
    arrays = [np.full((3, 4), n, np.float32) for n in range(20)]
    objects = {f"{n:02d}.npy": npy(array) for n, array in enumerate(arrays)}
    objects["03.npy"] = npy(np.zeros((2, 4), np.float32))
    found = cached(tmp_path, objects, skipped=0.1)
    assert set(found.holes) == {"03.npy"}
    batch = batches(tmp_path / "c")["x"]
    assert sorted(batch[:, 0, 0]) == [0, 1, 2, *range(4, 20)]
    table.record("few of another shape", arrives(batch[0]) + "; the few are holes")


KEYS = {
    "keys with spaces": ["sp ace/ lead.npy", "sp ace/trail /é ü.npy"],
    "keys with `#`, `%`, `+`, `&`, `?`": ["100%25/a+b&c=d.npy", "a#b.npy", "what?.npy", "%"],
    "keys with `..`, `.` and `//`": [
        "a/../../etc/passwd",
        "./d.npy",
        "a//b.npy",
        "..",
        "dot../x",
    ],
    "keys in other scripts": ["日本/語.npy", "€.npy", "\N{GRINNING FACE}.npy"],
    "keys with control characters": ["tab\there.npy"],
    'a key and a "folder" of its name': ["x", "x/y", "x/y/z.npy"],
    "a key of 1,024 bytes": ["k" * 1020 + ".npy"],
}


def test_odd_keys(tmp_path: Path, bucket: Bucket, table: Table) -> None:
    keys = [key for several in KEYS.values() for key in several]
    for number, key in enumerate(keys):
        bucket.put(key, npy(np.full((2, 2), number, np.int32)))
    source = {"url": bucket.url("**"), "storage_options": bucket.storage_options}
    config = write_config(tmp_path / "c.yaml", "", source=source)
    assert run(config, "--until-full") == (0, "")
    found = outcome(tmp_path / "c")
    assert sorted(found.samples) == sorted(keys)
    batch = batches(tmp_path / "c")["x"]
    assert sorted(batch[:, 1, 1]) == list(range(len(keys)))
    for row, several in KEYS.items():
        for key in several:
            (sample,) = found.samples[key]
            np.testing.assert_array_equal(sample["x"], np.full((2, 2), keys.index(key)))
        table.record(row, f"{arrives(sample['x'])}, the origin is the key as it is")
