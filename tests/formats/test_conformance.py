"""Every object format keeps the contract of `FormatTests`."""

from __future__ import annotations

import gzip
import io
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest

from growcache.errors import ConfigError
from growcache.formats import FORMATS, open_format
from tests.formats import (
    lmdb_built,
    test_audio,
    test_dicom,
    test_edf,
    test_fits,
    test_nifti,
    test_tar,
    test_tfrecord,
    test_tiff,
)
from tests.formats.conformance import Case, FormatTests
from tests.formats.test_images import encoded

MODULE = """
import io
import numpy as np

def decode(data):
    return {"x": np.load(io.BytesIO(data)).sum(), "text": "é"}

def value(data, key):
    return {"x": np.frombuffer(data, "u1").sum(), "key": key}

def record(data):
    return {"n": len(data)}

def read(object, rng):
    with object.open() as file:
        values = np.load(file)
    for row in values:
        yield {"x": row, "note": object.key, "noise": rng.random(2)}

def sample(store, rng):
    with store.open("neighbour") as file:
        return {"x": rng.permutation(np.load(file))[0]}
"""
MODULE_NAME = "conforming_user_formats"


def npy() -> bytes:
    file = io.BytesIO()
    np.save(file, np.arange(60, dtype=">i4").reshape(12, 5))
    return file.getvalue()


def hdf5() -> bytes:
    h5py = pytest.importorskip("h5py")
    file = io.BytesIO()
    with h5py.File(file, "w") as opened:
        values = np.arange(60, dtype=">i4").reshape(12, 5)
        opened.create_dataset("x", data=values, chunks=(4, 3), compression="gzip", shuffle=True)
        opened.create_dataset("note", data=[f"é{n}" for n in range(12)], chunks=(5,))
    return file.getvalue()


def json_lines() -> bytes:
    return b"".join(b'{"n": %d, "x": [0.5, %d], "t": "a"}\r\n' % (n, n) for n in range(12))


def parquet() -> bytes:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    file = io.BytesIO()
    columns = {"x": np.arange(12, dtype="f4"), "note": [f"é{n}" for n in range(12)]}
    pq.write_table(pa.table(columns), file, row_group_size=5)
    return file.getvalue()


def zarr_chunk() -> bytes:
    return gzip.compress(np.arange(60, dtype=">i4").tobytes(), mtime=0)


ZARR = {
    "folder/k/zarr.json": b"""{"zarr_format": 3, "node_type": "array", "shape": [12, 5],
    "data_type": "int32", "fill_value": 0, "chunk_key_encoding": {"name": "default"},
    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [12, 5]}},
    "codecs": [{"name": "bytes", "configuration": {"endian": "big"}}, {"name": "gzip"}]}"""
}


def records() -> bytes:
    return test_tfrecord.file(
        [test_tfrecord.example({"n": n, "x": [0.5, 1.0], "b": b"a" * n}) for n in range(12)]
    )


def archive() -> bytes:
    files = [(f"d/{n}.{ext}", b"%d" % n) for n in range(12) for ext in ("cls", "json", "bin")]
    return test_tar.archive([("d", b"no sample"), *files])


def npz(save: Callable[..., None] = np.savez) -> bytes:
    file = io.BytesIO()
    save(file, x=np.arange(60, dtype=">i4").reshape(12, 5), y=np.arange(12.0))
    return file.getvalue()


RAW = {"dtype": "<i2", "shape": [5]}


@pytest.fixture(scope="module", autouse=True)
def module(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("user")
    (folder / f"{MODULE_NAME}.py").write_text(MODULE)
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))
    sys.modules.pop(MODULE_NAME, None)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("npzz", "did you mean npz"),
        ("imge", "did you mean image"),
        ("lmbd", "did you mean lmdb"),
        ("zzz", "known are " + ", ".join(sorted(FORMATS))),
    ],
)
def test_formats_that_do_not_exist(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        open_format(name, {})


def test_every_format_is_here() -> None:
    here = {tests.form for tests in FormatTests.__subclasses__()}
    assert here == {*FORMATS, f"{MODULE_NAME}:read"}


class TestNpy(FormatTests):
    form = "npy"
    cases: ClassVar = {
        "npy": Case("npy", {}, npy),
        "npy rows": Case("npy", {"axis": 0}, npy),
        "npy windows": Case("npy", {"window": 3, "stride": 2, "phase": "random"}, npy),
    }
    wrong_options: ClassVar = [
        ({"windw": 3}, "did you mean window"),
        ({"axis": "time"}, "the number of an axis"),
        ({"stride": 1}, "needs window"),
        ({"phase": "random"}, "needs window"),
        ({"window": 3, "edge": "wrap"}, "drop or pad"),
        ({"window": 0}, "at least 1"),
        ({"window": True}, "found True"),
        ({"window": 3, "phase": "some"}, "zero or random"),
    ]


class TestNpz(FormatTests):
    form = "npz"
    imports = ("npy",)
    cases: ClassVar = {
        "npz": Case("npz", {}, npz),
        "npz fields": Case("npz", {"fields": ["y"]}, lambda: npz(np.savez_compressed)),
        "npz rows": Case("npz", {"axis": 0}, npz),
        "npz windows": Case("npz", {"window": 3, "stride": 2, "phase": "random"}, npz),
        "npz rows, whole": Case(
            "npz", {"axis": 0, "read": "whole"}, lambda: npz(np.savez_compressed)
        ),
    }
    wrong_options: ClassVar = [
        ({"field": ["x"]}, "did you mean fields"),
        ({"fields": "x"}, "list of different names"),
        ({"fields": []}, "list of different names"),
        ({"fields": ["x", "x"]}, "list of different names"),
        ({"read": "whole"}, "needs axis: 0 or window"),
        ({"axis": 0, "read": "all"}, "range or whole"),
        ({"axis": "time"}, "the number of an axis"),
    ]


class TestAudio(FormatTests):
    form = "audio"
    library = "soundfile"
    cases: ClassVar = {
        "wav": Case("audio", {"window": 7, "stride": 5}, test_audio.audio),
        "wav, padded": Case("audio", {"window": 7, "edge": "pad"}, test_audio.audio),
        "wav, in seconds": Case("audio", {"window": "1ms", "rate": 16000}, test_audio.audio),
        "flac": Case("audio", {}, lambda: test_audio.audio(form="FLAC")),
        "flac windows": Case(
            "audio", {"window": 7, "read": "whole"}, lambda: test_audio.audio(form="FLAC")
        ),
    }
    wrong_options: ClassVar = [
        ({"windw": 3}, "did you mean window"),
        ({"stride": 1}, "needs window"),
        ({"window": [3, 4]}, "a number of frames"),
        ({"window": "2s"}, "a time needs rate"),
        ({"dtype": "uint8"}, "float32 or int16"),
        ({"rate": 0}, "at least 1"),
        ({"read": "all"}, "range or whole"),
    ]


class TestEdf(FormatTests):
    form = "edf"
    options: ClassVar = {"window": 7, "channels": test_edf.CHANNELS}
    cases: ClassVar = {
        "edf": Case("edf", options, test_edf.small),
        "edf, padded": Case("edf", {**options, "edge": "pad", "stride": 5}, test_edf.small),
        "bdf": Case(
            "edf",
            {"window": 9, "stride": 2, "phase": "random"},
            lambda: test_edf.recording({"C3": 9}, 6, bits=24),
        ),
    }
    wrong_options: ClassVar = [
        ({}, "needs the length of a window"),
        ({"window": "4 m"}, "as in 2s or 500ms, found '4 m'"),
        ({"window": 3, "channel": ["x"]}, "did you mean channels"),
        ({"window": 3, "channels": []}, "list of different labels"),
        ({"window": 3, "dtype": "int16"}, "float32 or float64 or stored"),
    ]


class TestDicom(FormatTests):
    form = "dicom"
    library = "pydicom"
    cases: ClassVar = {
        "dicom": Case("dicom", {}, test_dicom.small),
        "dicom, rescaled": Case(
            "dicom", {"values": "rescaled", "attributes": ["PatientID"]}, test_dicom.small
        ),
    }
    wrong_options: ClassVar = [
        ({"attribute": ["x"]}, "did you mean attributes"),
        ({"attributes": "PatientID"}, "list of different keywords"),
        ({"values": "hu"}, "stored or rescaled"),
        ({"force": 1}, "true or false"),
    ]


@pytest.mark.slow
class TestFits(FormatTests):
    form = "fits"
    library = "astropy"
    cases: ClassVar = {
        "fits": Case("fits", {}, test_fits.small),
        "fits blocks": Case("fits", {"window": [4, 2]}, test_fits.scaled),
        "fits rows": Case("fits", {"table": "EVENTS"}, test_fits.table),
    }
    wrong_options: ClassVar = [
        ({"hud": 1}, "did you mean hdu"),
        ({"hdu": -1}, "number or name of an HDU"),
        ({"table": True}, "number or name of an HDU"),
        ({"columns": ["x"]}, "needs table"),
        ({"table": 1, "window": 3}, "its rows are the samples"),
        ({"stride": 1}, "needs window"),
    ]


class TestNifti(FormatTests):
    form = "nifti"
    library = "nibabel"
    cases: ClassVar = {
        "nifti": Case("nifti", {}, test_nifti.small),
        "nifti blocks": Case("nifti", {"window": [4, 2]}, test_nifti.small),
        "nifti slices, stored": Case("nifti", {"axis": 1, "dtype": "stored"}, test_nifti.small),
        "nifti packed": Case(
            "nifti",
            {"axis": 0, "compression": "gzip"},
            lambda: gzip.compress(test_nifti.small(), mtime=0),
        ),
    }
    wrong_options: ClassVar = [
        ({"windw": 3}, "did you mean window"),
        ({"stride": 1}, "needs window"),
        ({"dtype": "int16"}, "auto or stored or float32 or float64"),
        ({"compression": "lzma"}, "auto or none"),
    ]


class TestTiff(FormatTests):
    form = "tiff"
    library = "tifffile"
    cases: ClassVar = {
        "tiff": Case("tiff", {}, test_tiff.small),
        "tiff tiles": Case("tiff", {"window": [16, 16]}, test_tiff.tiled),
        "tiff pages": Case("tiff", {"axis": 0, "phase": "random"}, test_tiff.apart),
    }
    wrong_options: ClassVar = [
        ({"lvl": 1}, "did you mean level"),
        ({"level": -1}, "at least 0"),
        ({"page": 1, "series": 0}, "drop series and level"),
        ({"stride": 1}, "needs window"),
    ]


class TestRaw(FormatTests):
    form = "raw"
    options = RAW
    any_bytes = ("raw", "raw windows")
    cases: ClassVar = {
        "raw": Case("raw", RAW, npy),
        "raw windows": Case("raw", {**RAW, "window": 4, "edge": "pad"}, npy),
    }
    wrong_options: ClassVar = [
        ({}, "needs dtype"),
        ({"dtype": "nonsense"}, "dtype"),
        ({"dtype": "O"}, "expected a number"),
        ({"dtype": "f4", "shape": [0]}, "positive"),
        ({"dtype": "f4", "shape": "x"}, "positive"),
        ({"dtype": "f4", "channels": [0]}, "no channels"),
        ({"dtype": "f4", "shape": [3], "channels": [3]}, "from 0 to 2"),
        ({"dtype": "f4", "offset": -1}, "at least 0"),
        ({"dtype": "f4", "edge": "wrap"}, "drop or pad"),
    ]


class TestBytes(FormatTests):
    form = "bytes"
    any_bytes = ("bytes",)
    cases: ClassVar = {
        "bytes": Case("bytes", {}, npy),
        "bytes decoded": Case("bytes", {"decode": f"{MODULE_NAME}:decode"}, npy),
    }
    wrong_options: ClassVar = [
        ({"decod": "a:b"}, "did you mean decode"),
        ({"decode": "nonsense"}, "decode: expected package.module:function"),
        ({"decode": "no_such_module:f"}, "No module named"),
    ]


class TestImage(FormatTests):
    form = "image"
    cases: ClassVar = {
        "image": Case("image", {}, lambda: encoded("PNG")),
        "image decoded": Case("image", {"decode": True}, lambda: encoded("JPEG", (40, 30))),
        "image webp": Case(
            "image", {"decode": True, "classes": ["folder"]}, lambda: encoded("WEBP")
        ),
    }
    wrong_options: ClassVar = [
        ({"lable": "none"}, "did you mean label"),
        ({"label": "file"}, "folder or none"),
        ({"classes": []}, "list of different folder names"),
        ({"classes": ["a", "a"]}, "list of different folder names"),
        ({"classes": [True, False]}, "list of different folder names"),
        ({"classes": "a"}, "list of different folder names"),
        ({"classes": ["a"], "label": "none"}, "needs label: folder"),
        ({"decode": "yes"}, "true or false"),
    ]


class TestHdf5(FormatTests):
    form = "hdf5"
    library = "h5py"
    cases: ClassVar = {
        "hdf5": Case("hdf5", {"datasets": "x"}, hdf5),
        "hdf5 rows": Case("hdf5", {"datasets": ["x", "note"], "axis": 0}, hdf5),
        "hdf5 windows": Case(
            "hdf5", {"datasets": "x", "window": 3, "stride": 2, "phase": "random"}, hdf5
        ),
    }
    wrong_options: ClassVar = [
        ({"dataset": "x"}, "did you mean datasets"),
        ({"datasets": []}, "a list of paths"),
        ({"datasets": [1]}, "a list of paths"),
        ({"datasets": {"x": 1}}, "a list of paths"),
        ({"datasets": "/"}, "a list of paths"),
        ({"datasets": ["a/x", "b/x"]}, "two are named 'x'"),
        ({"axis": "time"}, "the number of an axis"),
        ({"stride": 2}, "needs window"),
        ({"edge": "pad"}, "needs window"),
        ({"window": 0}, "at least 1"),
        ({"window": 3, "edge": "wrap"}, "drop or pad"),
    ]


class TestLmdb(FormatTests):
    form = "lmdb"
    cases: ClassVar = {
        "lmdb": Case("lmdb", {"key": "bytes"}, lmdb_built.small),
        "lmdb decoded": Case("lmdb", {"decode": f"{MODULE_NAME}:value"}, lmdb_built.small),
    }
    wrong_options: ClassVar = [
        ({"databse": "x"}, "did you mean database"),
        ({"database": ""}, "expected a name, found ''"),
        ({"database": 3}, "expected a name, found 3"),
        ({"key": "int"}, "none or str or bytes, found 'int'"),
        ({"decode": "nonsense"}, "decode: expected package.module:function"),
        ({"decode": "io:StringIO", "key": "str"}, "only without decode"),
    ]


class TestJsonl(FormatTests):
    form = "jsonl"
    any_bytes = ("jsonl raw",)
    empty_is_sound = True
    cases: ClassVar = {
        "jsonl": Case("jsonl", {}, json_lines),
        "jsonl raw": Case("jsonl", {"raw": True}, json_lines),
        "jsonl compressed": Case(
            "jsonl", {"compression": "gzip"}, lambda: gzip.compress(json_lines(), mtime=0)
        ),
    }
    wrong_options: ClassVar = [
        ({"feilds": ["a"]}, "did you mean fields"),
        ({"raw": "yes"}, "true or false"),
        ({"raw": True, "fields": ["a"]}, "raw: true keeps whole lines"),
        ({"compression": "bz2"}, "auto or none or gzip or zlib or zstd, found 'bz2'"),
        ({"fields": []}, "list of different names"),
        ({"fields": "a"}, "list of names"),
        ({"fields": [1]}, "list of different names"),
        ({"fields": [["x", "float32"]]}, "list of different names"),
        ({"fields": {1: "float32"}}, "expected names, found 1"),
        ({"fields": {"a": "flaot32"}}, "no dtype 'flaot32'; did you mean float32"),
        ({"fields": {"a": 3}}, "a dtype, a path"),
        ({"fields": {"a": {"dtpye": "str"}}}, "did you mean dtype"),
        ({"fields": {"a": {"dtype": "floot32"}}}, "did you mean float32"),
        ({"fields": {"a": {"dtype": "object"}}}, "known are bool"),
        ({"fields": {"a": {"dtype": "int8", "default": 1000}}}, "a.default: a: expected int8"),
        ({"fields": {"a": {"path": []}}}, "expected a path"),
        ({"fields": {"a": "b..c"}}, "expected a path"),
    ]


class TestParquet(FormatTests):
    form = "parquet"
    library = "pyarrow"
    cases: ClassVar = {
        "parquet": Case("parquet", {}, parquet),
    }
    wrong_options: ClassVar = [
        ({"column": ["x"]}, "did you mean columns"),
        ({"columns": []}, "different names"),
        ({"columns": ["x", "x"]}, "different names"),
        ({"columns": [1]}, "different names"),
        ({"nulls": "zero"}, "error or drop"),
    ]


class TestZarr(FormatTests):
    form = "zarr"
    options: ClassVar[dict[str, Any]] = {"axis": 0}
    library = "numcodecs"
    cases: ClassVar = {
        "zarr": Case("zarr", {"axis": 0}, zarr_chunk, "folder/k/c/0/0", ZARR),
        "zarr windows": Case(
            "zarr",
            {"window": 3, "stride": 2, "phase": "random"},
            zarr_chunk,
            "folder/k/c/0/0",
            ZARR,
        ),
    }
    wrong_options: ClassVar = [
        ({}, "needs window, or axis: 0"),
        ({"windw": 1}, "did you mean window"),
        ({"window": 2, "beside": []}, "a list of paths"),
    ]


class TestTar(FormatTests):
    form = "tar"
    imports = ("npy", "image")
    cases: ClassVar = {
        "tar": Case("tar", {}, archive),
        "tar index": Case("tar", {"fields": ["cls"], "index": True}, archive),
        "tar compressed": Case(
            "tar", {"compression": "gzip"}, lambda: gzip.compress(archive(), mtime=0)
        ),
        "tar decoded": Case("tar", {"decode": f"{MODULE_NAME}:record"}, archive),
    }
    wrong_options: ClassVar = [
        ({"field": ["x"]}, "did you mean fields"),
        ({"fields": "jpg"}, "list of different extensions"),
        ({"fields": []}, "list of different extensions"),
        ({"fields": ["x", "x"]}, "list of different extensions"),
        ({"fields": ["x", ".X"]}, "list of different extensions"),
        ({"fields": ["__key__"]}, "an extension in addition to __key__"),
        ({"index": 1}, "true or false"),
        ({"decode": "jpg"}, "expected extension, images, none or package"),
        ({"compression": "bz2"}, "source.options.compression"),
    ]


class TestTfrecord(FormatTests):
    form = "tfrecord"
    empty_is_sound = True
    cases: ClassVar = {
        "tfrecord": Case("tfrecord", {}, records),
        "tfrecord index": Case("tfrecord", {"decode": "none", "index": True}, records),
        "tfrecord compressed": Case(
            "tfrecord", {"compression": "gzip"}, lambda: gzip.compress(records(), mtime=0)
        ),
        "tfrecord decoded": Case("tfrecord", {"decode": f"{MODULE_NAME}:record"}, records),
    }
    wrong_options: ClassVar = [
        ({"feature": ["a"]}, "did you mean features"),
        ({"index": 1}, "true or false"),
        (
            {"decode": "exampel"},
            "expected auto, example, sequence_example, none or package.module:function",
        ),
        ({"decode": "none", "features": ["a"]}, "needs decode: example or seq"),
        ({"features": "a"}, "list of names"),
        ({"features": {"a": "flaot32"}}, "such as float32, found 'flaot32'"),
        ({"features": {"a": ["float32", -1]}}, "at most one of them null"),
        ({"features": {"a": ["float32", None, 3, None]}}, "at most one of them null"),
        ({"features": {"a": ["bytes", 3]}}, "at most one of them null"),
        ({"compression": "lz4"}, "auto or none"),
    ]


class TestUser(FormatTests):
    form = f"{MODULE_NAME}:read"
    cases: ClassVar = {
        "user read": Case(f"{MODULE_NAME}:read", {}, npy),
        "user sample": Case(f"{MODULE_NAME}:sample", {}, npy),
    }
    wrong_options: ClassVar = [
        ({"unknown": 1}, "unknown"),
    ]
