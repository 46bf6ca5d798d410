"""What is proposed for an object, by its first bytes."""

import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from growcache.cli.container_probe import FormatProposal
from growcache.cli.source_probe import HEAD_BYTES, propose_bound, propose_format
from growcache.formats import open_format
from tests.formats.lmdb_built import small
from tests.formats.test_tar import archive
from tests.formats.test_tfrecord import example, file


def array(shape: tuple[int, ...], dtype: str = "<f4", order: Any = "C") -> FormatProposal:
    """The proposal for an ``.npy`` file of that shape, of which only the head is made."""
    head = io.BytesIO()
    header = {"descr": dtype, "fortran_order": order == "F", "shape": shape}
    np.lib.format.write_array_header_1_0(head, header)
    values = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    return propose_format("a/b.npy", head.getvalue(), len(head.getvalue()) + values)


@pytest.mark.parametrize(
    ("shape", "options", "samples"),
    [
        ((), {}, 1),
        ((64, 64), {}, 1),
        ((16384, 4), {}, 1),  # 256 KiB: a recording that is one sample
        ((1, 4096, 4096), {}, 1),
        ((480, 640, 3), {}, 1),  # an image
        ((3, 2000, 2000), {}, 1),
        ((0, 64), {}, 1),
        ((60000, 28, 28), {"axis": 0}, 60000),
        ((300, 240, 320, 3), {"axis": 0}, 300),
        ((100_000, 2048), {"axis": 0}, 100_000),
        ((10_000_000, 4), {"window": 4096}, 2441),
        ((10_000_000,), {"window": 16384}, 610),
    ],
)
def test_an_array_by_its_shape(
    shape: tuple[int, ...], options: dict[str, Any], samples: int
) -> None:
    found = array(shape)
    assert (found.format, found.options, found.samples) == ("npy", options, samples)
    assert "float32" in found.reasons[0]


def test_columns_are_no_rows() -> None:
    found = array((10_000_000, 4), order="F")
    assert found.options == {}
    assert "Fortran" in found.reasons[1]


@pytest.mark.parametrize(
    "head", [b"\x93NUMPY\x01\x00\x76\x00{'descr': [('a', '<i4')]", b"\x93NUMPY"]
)
def test_an_array_that_cannot_be_read_becomes_bytes(head: bytes) -> None:
    found = propose_format("a.npy", head, 1000)
    assert found.format == "bytes"
    assert "cannot be read" in found.reasons[0]


def test_an_archive_of_arrays() -> None:
    found = propose_format("a/b.npz", b"PK\x03\x04" + bytes(100), 5000)
    assert (found.format, found.options) == ("npz", {})
    assert "axis: 0" in found.reasons[1]
    assert propose_format("a/b.zip", b"PK\x03\x04" + bytes(100), 5000).format == "bytes"


def test_an_lmdb_file() -> None:
    found = propose_format("a/data.mdb", small(), len(small()))
    assert (found.format, found.options, found.samples) == ("lmdb", {}, 6)
    assert "6 values" in found.reasons[0]
    assert propose_format("a/data.mdb", small()[:600], len(small())).format == "bytes"


EXAMPLES = file([example({"x": [1.0, 2.0]})])
JPEG = b"\xff\xd8\xff\xe0" + bytes(100)
PNG = b"\x89PNG\r\n\x1a\n" + bytes(100)


@pytest.mark.parametrize("head", [JPEG, PNG])
@pytest.mark.parametrize(
    ("key", "folders", "options"),
    [
        ("x.jpg", (), {"label": "none"}),
        ("data/x.jpg", ("data",), {"label": "none"}),
        ("dog/x.jpg", ("dog", "cat"), {"classes": ["cat", "dog"]}),
        ("dog/x.jpg", (), {"label": "folder"}),  # not all of the listing is known
    ],
)
def test_an_image_by_its_folders(
    head: bytes, key: str, folders: tuple[str, ...], options: dict[str, Any]
) -> None:
    found = propose_format(key, head, 5000, folders)
    assert (found.format, found.options) == ("image", options)


@pytest.mark.parametrize(
    ("key", "head", "size", "format_", "said"),
    [
        ("a.h5", b"\x89HDF\r\n\x1a\n", 1 << 30, "hdf5", "HDF5"),
        ("a.parquet", b"PAR1", 1 << 30, "parquet", "each row"),
        ("a.zip", b"PK\x03\x04", 999, "bytes", "zip"),
        ("a.f32", b"\0\0\0\0", 1 << 20, "raw", "<f4"),
        ("a.dat", b"what is it", 1 << 30, "raw", "Set dtype"),
        ("a.tar", archive([("0.x", b"")]), 1 << 30, "tar", "names are the same"),
        ("a.jsonl", b'{"a": 1}\n{"a": 2}\n{"a"', 1 << 30, "jsonl", "Lines of JSON"),
        ("a.tfrecord", EXAMPLES, 1 << 30, "tfrecord", "features"),
        ("a.rec", file([b"x" * 30_000])[:16_384], 1 << 30, "tfrecord", "kept as bytes"),
        ("a.jsonl", b"\x1f\x8b\x08", 1 << 20, "bytes", "gzip"),
        ("a.txt", b"what is it", 10, "bytes", "Nothing known"),
    ],
)
def test_others(key: str, head: bytes, size: int, format_: str, said: str) -> None:
    found = propose_format(key, head, size)
    assert found.format == format_
    assert said in " ".join(found.reasons)


@given(
    st.text(max_size=20),
    st.sampled_from([b"", b"\x93NUMPY\x01\x00", JPEG, b"PK\x03\x04"]).flatmap(
        lambda magic: st.binary(max_size=200).map(lambda rest: magic + rest)
    ),
    st.integers(1, 1 << 50),
)
def test_whatever_it_is_the_proposal_is_a_format_with_options(
    key: str, head: bytes, size: int
) -> None:
    found = propose_format(key, head[:HEAD_BYTES], size)
    open_format(found.format, found.options)
    assert found.samples >= 1
    assert found.reasons


@pytest.mark.parametrize(
    ("free", "source", "bound"),
    [
        (100e9, None, 50e9),
        (100e9, 10e12, 50e9),
        (100e9, 3e9, 5e9),
        (31e9, None, 10e9),
        (1e6, None, 1e6),
    ],
)
def test_the_bound_is_half_of_what_is_free_or_what_there_is(
    free: float, source: float | None, bound: float
) -> None:
    found, why = propose_bound(int(free), None if source is None else int(source))
    assert found == bound
    assert "free" in why
