"""What is guessed from the first bytes of an object: dtypes, rates, shapes, and files that no format reads."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from growcache.cli.guess_dtype import guess_dtype
from growcache.cli.other_kinds import is_text, other_kind
from growcache.cli.propose_recordings import (
    audio_candidates,
    edf_candidates,
    labels_by_rate,
    nifti_candidates,
    rate_of_audio,
)
from growcache.cli.source_probe import probe_source
from growcache.config_source import SourceConfig

RANDOM = np.random.default_rng(0)
SIGNALS = {
    "slow": 300 * np.sin(np.arange(9000) / 40) + RANDOM.normal(0, 20, 9000),
    "white": RANDOM.normal(0, 500, 9000),
    "positive": 1000 + RANDOM.normal(0, 100, 9000),
}


@pytest.mark.parametrize("signal", SIGNALS)
@pytest.mark.parametrize("dtype", ["<i2", ">i2", "<i4", ">i4", "<f4", ">f4", "<f8", ">f8"])
def test_a_dtype_is_guessed_from_bytes(dtype: str, signal: str) -> None:
    assert guess_dtype(SIGNALS[signal].astype(dtype).tobytes()) == dtype


def test_small_integers_and_bytes() -> None:
    assert guess_dtype(RANDOM.integers(0, 200, 9000).astype("u1").tobytes()) == "|u1"


@pytest.mark.parametrize(
    "data",
    [
        bytes(9000),
        RANDOM.bytes(9000),
        zlib.compress(RANDOM.bytes(9000)),
        b"few",
    ],
    ids=["zeros", "random", "compressed", "few"],
)
def test_no_dtype_is_guessed(data: bytes) -> None:
    assert guess_dtype(data) == ""


@pytest.mark.parametrize(
    ("key", "head", "form", "said"),
    [
        ("a.nc", b"CDF\x02", "growcache.readers:netcdf3", "nccopy"),
        ("a.mat", b"MATLAB 5.0 MAT-file, x", "growcache.readers:mat", "-v7.3"),
        ("a.pt", b"PK\x03\x04", "bytes", "torch reads it"),
        ("a.pkl", b"\x80\x04\x95", "bytes", "unpickle_arrays"),
        ("a.csv", b"\xef\xbb\xbfa,b\n1,2\n", "bytes", "columns a, b."),
        ("a.json", b'{"a": 1}\n{"a": 2}\n', "jsonl", "Each line is a JSON object"),
        ("part-00000", b'{"a": 1}\r\n{"a": 2}', "jsonl", "Each line is a JSON object"),
        ("a.json", b'{\n "a": 1}', "bytes", "JSON document"),
        ("a.txt", b"one\ntwo", "jsonl", "each line is a sample"),
        ("a.txt", "one".encode("utf-16"), "bytes", "iconv"),
    ],
)
def test_files_that_no_format_reads(key: str, head: bytes, form: str, said: str) -> None:
    found = other_kind(key, head, many=False)
    assert found is not None
    assert found.format == form
    assert said in " ".join(found.findings)
    compile(found.reader, "my_reader.py", "exec")


def test_blank_lines_are_passed_over_at_once() -> None:
    assert other_kind("a.xyz", b"{}" + b"\n" * 100_000 + b"x", many=False) is None


def test_a_text_is_a_sample_of_many_and_unknown_bytes_are_nothing() -> None:
    assert other_kind("a.txt", b"one\ntwo", many=True).format == "bytes"  # type: ignore[union-attr]
    assert other_kind("a.xyz", b"one\0two", many=False) is None
    assert is_text("ü".encode()[:1])  # cut off
    assert not is_text(b"\xfc is Latin-1")


def header(rates: dict[str, int], seconds: str = "2") -> bytes:
    """Return the header of an EDF file."""
    labels = "".join(label.ljust(16) for label in rates)
    counts = "".join(str(2 * rate).ljust(8) for rate in rates.values())
    start = "0".ljust(244) + seconds.ljust(8) + str(len(rates)).ljust(4)
    return (start + labels + " " * 200 * len(rates) + counts).encode()


def test_signals_of_the_rate_that_most_have() -> None:
    head = header({"C3": 100, "C4": 100, "temperature": 1, "EDF Annotations": 30})
    assert labels_by_rate(head) == {100: ["C3", "C4"], 1: ["temperature"]}
    ((options, findings),) = edf_candidates(head)
    assert options == {"channels": ["C3", "C4"], "window": "2s"}
    assert "1 signal has another rate" in findings[1]
    for damaged in (head[:300], header({"C3": 100}, "0"), b""):
        assert labels_by_rate(damaged) == {}
        assert edf_candidates(damaged)[0][0] == {"window": "2s"}


@pytest.mark.parametrize("order", ["<", ">"])
def test_volumes_of_a_series_are_samples(order: str) -> None:
    head = bytes(40) + struct.pack(f"{order}8h", 4, 64, 64, 30, 200, 1, 1, 1) + bytes(300)
    assert nifti_candidates(head)[0][0] == {"axis": 3}
    assert nifti_candidates(head[:100])[0][0] == {}


def test_rates_of_audio() -> None:
    wav = b"RIFF\0\0\0\0WAVEfmt " + struct.pack("<IHHI", 16, 1, 1, 44100)
    assert rate_of_audio(wav) == 44100
    assert audio_candidates(wav)[0][0] == {"window": "1s", "rate": 44100}
    assert audio_candidates(b"OggS")[0][0] == {"window": 16000}


def test_stores_of_a_glob_and_files_of_git_lfs(tmp_path: Path) -> None:
    pytest.importorskip("zarr")
    from tests.cli.kinds import zarr_store

    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        zarr_store(tmp_path / name, 3)
    found = probe_source(SourceConfig(url=(f"{tmp_path}/*/*.zarr",)))
    assert (found.url, found.samples) == (f"{tmp_path}/*/*.zarr/x/**", 40)
    (tmp_path / "a.npy").write_bytes(
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0"
    )
    lfs = probe_source(SourceConfig(url=(f"{tmp_path}/a.npy",)))
    assert "git lfs pull" in " ".join(lfs.findings)


def test_an_archive_of_pickles_is_no_array(tmp_path: Path) -> None:
    data = io.BytesIO()
    np.save(data, np.array([{}], object), allow_pickle=True)
    (tmp_path / "a.npy").write_bytes(data.getvalue())
    found = probe_source(SourceConfig(url=(f"{tmp_path}/a.npy",)))
    assert "cannot be read as npy" in found.findings[0]


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("a.mat", b"MATLAB 5.0 MAT-file, damaged".ljust(400), "growcache.readers:mat"),
        ("a.nc", b"CDF\x01" + bytes(90), "growcache.readers:netcdf3"),
        ("a.json", b'{"a": 1}\n{"a": }\n', "Each line is a JSON object"),
        ("a.json", b'{"a": }\n{"a": \n', "cannot be read as jsonl"),
    ],
)
def test_what_was_guessed_wrong_stays_bytes_with_the_reason(
    name: str, data: bytes, said: str, tmp_path: Path
) -> None:
    pytest.importorskip("scipy")
    (tmp_path / name).write_bytes(data)
    found = probe_source(SourceConfig(url=(f"{tmp_path}/{name}",)))
    assert said in f"{found.format} {' '.join(found.findings)}"
