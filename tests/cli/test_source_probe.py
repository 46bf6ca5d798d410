"""What is proposed for objects, by their shapes, their first bytes and their names."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from growcache.cli.cli import main
from growcache.cli.detect_format import HEAD_BYTES, detect_format
from growcache.cli.init_choices import propose_bound
from growcache.cli.propose_options import array_options, candidates
from growcache.cli.prove_candidate import ProbedSource
from growcache.cli.source_probe import probe_source
from growcache.config_source import SourceConfig
from growcache.formats import FORMATS, open_format
from growcache.store.contract import Entry
from tests.formats.lmdb_built import small
from tests.formats.test_tar import archive
from tests.formats.test_tfrecord import example, file


@pytest.mark.parametrize(
    ("shape", "many", "options"),
    [
        ((), False, {}),
        ((64, 64), True, {}),
        ((16384, 4), True, {}),  # 256 KiB: a recording that is one sample, of many
        ((16384, 4), False, {"window": 4096}),  # the whole source
        ((1, 4096, 4096), False, {}),
        ((480, 640, 3), False, {}),  # an image
        ((3, 2000, 2000), False, {}),
        ((4, 3, 1000), True, {"axis": 0}),  # too flat for an image
        ((0, 64), False, {}),
        ((60000, 28, 28), False, {"axis": 0}),
        ((300, 240, 320, 3), False, {"axis": 0}),
        ((100_000, 2048), False, {"axis": 0}),
        ((10_000_000, 4), False, {"window": 4096}),
        ((10_000_000,), True, {"window": 16384}),
        ((64, 100_000), False, {"axis": 1, "window": 256}),  # channels and time
        ((64, 100_000), True, {"axis": 1, "window": 256}),
        ((64, 4000), True, {}),
        ((100, 4096), False, {"axis": 0}),  # embeddings
        ((2, 3, 50_000), False, {"axis": 2, "window": 2048}),
    ],
)
def test_an_array_by_its_shape(
    shape: tuple[int, ...], many: bool, options: dict[str, Any]
) -> None:
    assert array_options(shape, 4, many=many)[0] == options


def test_windows_divide_chunks() -> None:
    assert array_options((3000, 16), 4, many=False, chunks=[96, 16])[0] == {"window": 96}


EXAMPLES = file([example({"x": [1.0, 2.0]})])
JPEG = b"\xff\xd8\xff\xe0" + bytes(100)
PNG = b"\x89PNG\r\n\x1a\n" + bytes(100)


@pytest.mark.parametrize(
    ("key", "head", "form"),
    [
        ("a/b.npy", b"\x93NUMPY\x01\x00\x76\x00", "npy"),
        ("a.h5", b"\x89HDF\r\n\x1a\n", "hdf5"),
        ("a.parquet", b"PAR1", "parquet"),
        ("a/data.mdb", small(), "lmdb"),
        ("a/data.mdb", small()[:16], ""),
        ("a.npz", b"PK\x03\x04" + bytes(100), "npz"),
        ("a.zip", b"PK\x03\x04" + bytes(100), ""),
        ("a", JPEG, "image"),
        ("a", PNG, "image"),
        ("a.f32", b"\0\0\0\0", "raw"),
        ("a.dat", b"what is it", ""),
        ("a", archive([("0.x", b"")]), "tar"),
        ("a", EXAMPLES, "tfrecord"),
        ("a.jsonl", b'{"a": 1}\n{"a": 2}\n{"a"', "jsonl"),
        ("a.nii", bytes(344) + b"n+1\0", "nifti"),
        ("a.wav", b"RIFF\x24\x00\x00\x00WAVEfmt ", "audio"),
        ("a.flac", b"fLaC\x00\x00\x00\x22", "audio"),
        ("a.fits", b"SIMPLE  =                    T", "fits"),
        ("a.tif", b"II*\0\x08\0\0\0", "tiff"),
        ("a.tiff", b"MM\0+\0\x08\0\0", "tiff"),
        ("a.dcm", bytes(128) + b"DICM", "dicom"),
        ("a.bdf", b"\xffBIOSEMI", "edf"),
        ("a.edf", b"0       X X X X", "edf"),
        ("a.txt", b'{"a": 1}\n', ""),
        ("a.jsonl", b"\x1f\x8b\x08", ""),
    ],
)
def test_an_object_by_its_first_bytes(key: str, head: bytes, form: str) -> None:
    assert detect_format(key, head) == (form, "")


@pytest.mark.parametrize(
    ("key", "folders", "options"),
    [
        ("x.jpg", set(), {"label": "none"}),
        ("data/x.jpg", {"data"}, {"label": "none"}),
        ("dog/x.jpg", {"dog", "cat"}, {"classes": ["cat", "dog"]}),
        ("dog/x.jpg", set(), {"label": "folder"}),  # not all of the listing is known
    ],
)
def test_an_image_by_its_folders(key: str, folders: set[str], options: dict[str, Any]) -> None:
    ((found, _),) = candidates("image", "", Entry(key, 5000, None, None), PNG, folders)
    assert found == options


@given(
    st.text(max_size=20),
    st.sampled_from([b"", b"\x93NUMPY\x01\x00", JPEG, b"PK\x03\x04"]).flatmap(
        lambda magic: st.binary(max_size=200).map(lambda rest: magic + rest)
    ),
    st.integers(1, 1 << 50),
)
def test_whatever_it_is_each_candidate_is_a_format_with_options(
    key: str, head: bytes, size: int
) -> None:
    form, compression = detect_format(key, head[:HEAD_BYTES])
    assert form in ("", *FORMATS)
    for options, _ in candidates(form, compression, Entry(key, size, None, None), head, set()):
        open_format(form, options)


# ------------------------------------------------------- what a source is taken for


def probed(url: object) -> ProbedSource:
    return probe_source(SourceConfig(url=(str(url),)))


def saved(folder: Path, count: int, shape: tuple[int, ...] = (64, 32, 32)) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        np.save(folder / f"{i:02d}.npy", np.zeros(shape, "<f4"))
    return folder


def test_other_files_do_not_decide_and_the_url_passes_them_over(tmp_path: Path) -> None:
    folder = saved(tmp_path / "data", 3)
    for name in ("0README.md", "_metadata", "0.json"):
        (folder / name).write_text("{}")
    found = probed(f"{folder}/**")
    assert (found.format, found.options) == ("npy", {"axis": 0})
    assert found.url == f"{folder}/**/*.npy"
    assert "matched others as well" in found.findings[0]
    config, cache = tmp_path / "c.yaml", tmp_path / "cache"
    words = ["init", str(config), "--yes", "--url", f"{folder}/**", "--cache", str(cache)]
    assert main(words) == 0
    assert main(["run", str(config), "--samples", "4"]) == 0


def test_an_array_alone_is_no_single_sample(tmp_path: Path) -> None:
    found = probed(saved(tmp_path, 1, (16384, 4)) / "00.npy")
    assert found.options == {"window": 4096}
    assert (found.samples, found.sample_bytes) == (4, 1 << 16)
    assert "x: float32[4096, 4]; about 4 samples each" in found.findings[-1]


def test_columns_are_cut_by_range_too(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((100_000, 8), "f4", order="F"))
    found = probed(tmp_path / "a.npy")
    assert found.options == {"window": 2048}
    assert "Fortran" in found.findings[0]


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        (
            "a.npy",
            b"\x93NUMPY\x01\x00\x76\x00{'descr': [('a', '<i4')]",
            "cannot be read as npy",
        ),
        ("a.npy", b"\x93NUMPY", "cannot be read as npy"),
        ("a.wav", b"RIFF" + bytes(90), "starts with b'RIFF"),
        ("a.dat", bytes(9 << 20), "not recognised"),
        ("a.tar", archive([("0.x", b"")])[:100], "not recognised"),
    ],
)
def test_what_cannot_be_read_stays_bytes(
    name: str, data: bytes, said: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(data)
    found = probed(tmp_path / name)
    assert (found.format, found.options, found.samples) == ("bytes", {}, 1)
    assert said in found.findings[0]


def test_records_of_another_kind_are_kept_as_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.rec").write_bytes(file([b"x" * 30_000] * 3))
    found = probed(tmp_path / "a.rec")
    assert (found.format, found.options) == ("tfrecord", {"decode": "none"})


def test_objects_whose_samples_differ_are_said_to(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    np.save(tmp_path / "zz.npy", np.zeros((64, 32, 32), "<i8"))
    found = probed(tmp_path / "*.npy")
    assert "whose samples differ" in found.findings[-1]


def test_one_object_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    saved(tmp_path, 3)
    (tmp_path / "00.npy").write_bytes(b"\x93NUMPY")
    found = probed(tmp_path / "*.npy")
    assert found.options == {"axis": 0}
    assert any("One object cannot be read this way" in text for text in found.findings)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_an_archive_of_arrays_is_rows_where_they_are_equally_many(
    save: Any, tmp_path: Path
) -> None:
    save(tmp_path / "a.npz", x=np.zeros((500, 64)), y=np.arange(500))
    found = probed(tmp_path / "a.npz")
    whole = {} if save is np.savez else {"read": "whole"}
    assert (found.options, found.samples) == ({"axis": 0, **whole}, 500)
    save(tmp_path / "b.npz", x=np.zeros((50, 64)), y=np.arange(3))
    assert probed(tmp_path / "b.npz").options == {}


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
    found, reason = propose_bound(int(free), None if source is None else int(source))
    assert found == bound
    assert "free" in reason
