"""Sources of which some objects are compressed, as each one's name says."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from growcache.cache.status import read_status
from growcache.config_source import SourceConfig
from growcache.errors import FormatError
from growcache.formats import names_decide, open_format
from growcache.loading.snapshot import Snapshot
from tests.formats.held import Held, visited
from tests.formats.test_tfrecord import file as record_file
from tests.sampling.services import run, write_config

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


def lines(first: int, count: int) -> bytes:
    return b"".join(json.dumps({"x": n}).encode() + b"\n" for n in range(first, first + count))


def archive() -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as written:
        for n in range(4):
            member = tarfile.TarInfo(f"{n}.cls")
            member.size = 1
            written.addfile(member, io.BytesIO(str(n).encode()))
    return stream.getvalue()


def one_member(data: bytes) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as written:
        member = tarfile.TarInfo("0.x.npy")
        member.size = len(data)
        written.addfile(member, io.BytesIO(data))
    return stream.getvalue()


CASES: list[tuple[str, str, bytes, dict[str, Any]]] = [
    ("jsonl", "a.jsonl", lines(0, 40), {}),
    ("tar", "a.tar", archive(), {}),
]


@pytest.mark.parametrize("ending", COMPRESS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_each_object_is_read_as_its_name_says(case: Any, ending: str) -> None:
    form, name, data, options = case
    opened = open_format(form, options, ("s3://b/*",))
    held = Held(COMPRESS[ending](data), name + ending)
    assert opened.reads_whole(held.entry) == bool(ending)
    parts = 1 if ending else 3
    found = [row for part in range(parts) for row in visited(opened, held, part, parts)]
    expected = visited(open_format(form, options), Held(data))
    assert [start for _, start, _ in found] == [start for _, start, _ in expected]
    measured = asyncio.run(opened.measure(held))
    assert measured == asyncio.run(opened.measure(Held(data, name)))


def test_first_bytes_decide_what_a_name_promises() -> None:
    opened = open_format("jsonl", {}, ("s3://b/*",))
    expected = [row[0] for row in visited(opened, Held(lines(0, 9), "a"))]
    for data in (lines(0, 9), zstandard.compress(lines(0, 9))):
        assert [row[0] for row in visited(opened, Held(data, "a.gz"))] == expected
    with pytest.raises(FormatError, match="set compression: gzip"):
        visited(opened, Held(gzip.compress(lines(0, 9)), "a"))
    # A cache of before has such an object in parts, which were holes.
    with pytest.raises(FormatError, match="set compression: gzip"):
        visited(opened, Held(gzip.compress(lines(0, 9)), "a.gz"), 1, 2)


@pytest.mark.parametrize(
    ("urls", "decided"),
    [
        (("s3://b/*.jsonl",), False),
        (("s3://b/*.jsonl.gz",), False),
        (("s3://b/x",), False),
        (("https://h/x?y",), False),
        (("s3://b/**",), True),
        (("s3://b/part-[0-9]*",), True),
        (("s3://b/*.jsonl", "s3://b/*.jsonl.gz"), True),
    ],
)
def test_globs_tell_whether_names_decide(urls: tuple[str, ...], decided: bool) -> None:
    assert names_decide(SourceConfig(url=urls, format="jsonl")) == decided
    told = SourceConfig(url=urls, format="jsonl", options={"compression": "gzip"})
    assert not names_decide(told)


def test_volumes_are_read_as_their_names_and_bytes_say() -> None:
    nibabel = pytest.importorskip("nibabel")
    values = np.arange(24, dtype=np.int16).reshape(2, 3, 4)
    data = nibabel.Nifti1Image(values, np.eye(4)).to_bytes()
    for cut in ({}, {"window": [2, 3, 2]}):
        opened = open_format("nifti", cut, ("s3://b/*",))
        expected = [row[0]["x"] for row in visited(opened, Held(data, "a.nii"))]
        for name, packed in (("a.nii.gz", gzip.compress(data)), ("b.nii.gz", data)):
            found = [row[0]["x"] for row in visited(opened, Held(packed, name))]
            np.testing.assert_array_equal(found, expected)
    whole = open_format("nifti", {}, ("s3://b/*",))
    (row,) = visited(whole, Held(gzip.compress(data), "gz-without-a-name.nii"))
    np.testing.assert_array_equal(row[0]["x"], values)


def test_a_folder_of_both(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    for number, ending in enumerate(["", ".gz", "", ".zst", ".gz", ""]):
        path = tmp_path / "d" / f"{number}.jsonl{ending}"
        path.write_bytes(COMPRESS[ending](lines(1000 + 100 * number, 100)))
    sampling = {"samples_per_object": 10, "shard_samples": 50}
    config = write_config(
        tmp_path / "c.yaml", f"{tmp_path}/d/*", source={"format": "jsonl"}, sampling=sampling
    )
    assert run(config, "--until-full") == (0, "")
    status = read_status(tmp_path / "c")
    assert (status.population, status.holes) == (3 * 10 + 3, 0)
    with Snapshot.take(tmp_path / "c") as snapshot:
        found = sorted(int(snapshot[i]["x"]) for i in range(len(snapshot)))
    assert found == list(range(1000, 1600))
    assert run(config, "--until-full") == (0, "")


@pytest.mark.parametrize("name", ["a.tar.gz", "mixed/a.tar.gz", "a.tfrecord.gz"])
def test_masks_that_are_nearly_empty_are_no_bomb(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("growcache.formats.compressed._LIKELY_BYTES", 1 << 20)
    mask = io.BytesIO()
    np.save(mask, np.zeros((1 << 11, 1 << 10), np.uint8))
    form = "tfrecord" if "tfrecord" in name else "tar"
    data = record_file([mask.getvalue()]) if form == "tfrecord" else one_member(mask.getvalue())
    url = "s3://b/*" if "mixed" in name else f"s3://b/*.{form}.gz"
    options = {"decode": "none"} if form == "tfrecord" else {}
    reader = open_format(form, options, [url])
    held = Held(gzip.compress(data), name)
    asyncio.run(reader.measure(held))
    ((sample, _, _),) = visited(reader, held)
    assert "x.npy" in sample or "data" in sample
    with pytest.raises(FormatError, match="a compressed object may be unpacked to"):
        visited(reader, Held(gzip.compress(bytes(1 << 21), 9), name))


def test_lines_that_repeat_are_no_bomb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("growcache.formats.compressed._LIKELY_BYTES", 1 << 10)
    reader = open_format("jsonl", {"fields": ["id"]}, ["s3://b/*.jsonl.gz"])
    lines = b'{"id": 1, "text": "the same"}\n' * 20_000
    assert len(visited(reader, Held(gzip.compress(lines, 9), "a.jsonl.gz"))) == 20_000
    for bomb in (bytes(1 << 20), b"\n" * (1 << 20)):
        with pytest.raises(FormatError, match="a compressed object may be unpacked to"):
            visited(reader, Held(gzip.compress(bomb, 9), "a.jsonl.gz"))
