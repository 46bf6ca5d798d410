"""Format tar: which members are a sample, whose it is, what they become, and what is refused."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from growcache.errors import FormatError
from growcache.formats import open_format
from growcache.formats.base import PartlyReadError, Visit, read_partly
from growcache.formats.tar_scan import SampleScan, pax_records, sample_key_and_extension
from tests.formats.held import Held, Row, visited

RAW = {"decode": "none"}
Files = Sequence[tuple[str, bytes]]
DIALECTS = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)


def info(name: str, size: int = 0, kind: bytes = tarfile.REGTYPE) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size, member.type = size, kind
    return member


def archive(files: Files, dialect: int = tarfile.PAX_FORMAT, **more: Any) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=dialect, **more) as opened:
        for name, data in files:
            opened.addfile(info(name, len(data)), io.BytesIO(data))
    return made.getvalue()


def samples(count: int, nbytes: int = 3000) -> list[tuple[str, bytes]]:
    rng = np.random.default_rng(0)
    files = []
    for n in range(count):
        size = int(rng.integers(nbytes // 2, nbytes * 3 // 2))
        files += [(f"a/{n:06}.jpg", rng.bytes(size)), (f"a/{n:06}.cls", b"%d" % n)]
    return files


def expected(files: Files) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for name, data in files:
        key, ext = sample_key_and_extension(name) or ("", "")
        if key and (not found or found[-1]["__key__"] != key):
            found.append({"__key__": key})
        if key:
            found[-1][ext] = data
    return found


def parts_of(object_format: Any, data: bytes, count: int) -> list[Row]:
    return [
        row for part in range(count) for row in visited(object_format, Held(data), part, count)
    ]


def values(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [sample for sample, _, _ in rows]


NAMES = st.sampled_from(["a", "b", "d/c", "x" * 120, "é" * 70, "long/" * 30 + "e", "n" * 99])


@settings(deadline=None)
@given(
    st.lists(st.tuples(NAMES, st.sampled_from([0, 1, 511, 512, 700, 5000])), max_size=12),
    st.sampled_from(DIALECTS),
    st.integers(1, 40),
    st.booleans(),
    st.booleans(),
)
def test_each_sample_is_of_one_part(
    made: list[tuple[str, int]], dialect: int, parts: int, index: bool, large: bool
) -> None:
    files = []
    for n, (name, size) in enumerate(made):
        name = name.replace("é", "e") if dialect == tarfile.USTAR_FORMAT else name
        name = name[-90:] if dialect == tarfile.USTAR_FORMAT else name
        files.append((f"{name}.{n}", bytes([n + 1]) * size))
    if large:
        files = [*files, ("README", bytes(300_000)), *((f"z{n}", d) for n, d in files)]
    data = archive(files, dialect)
    object_format = open_format("tar", {**RAW, "index": index})
    found = parts_of(object_format, data, parts)
    assert values(found) == expected(files)
    assert [row[1:] for row in found] == [row[1:] for row in visited(object_format, Held(data))]
    for sample, start, stop in found:
        with tarfile.open(fileobj=io.BytesIO(data[start:stop])) as opened:
            assert len(opened.getmembers()) == len(sample) - 1


@pytest.mark.parametrize("dialect", DIALECTS[1:])
@pytest.mark.parametrize("parts", [1, 3, 17, 400])
def test_each_sample_of_a_large_object_is_of_one_part(parts: int, dialect: int) -> None:
    files = samples(150)
    if dialect != tarfile.USTAR_FORMAT:
        files = [("a" * (n % 9 * 40) + name, data) for n, (name, data) in enumerate(files)]
        files[10:12] = [("e" * 30_000 + name, data) for name, data in files[10:12]]
    data = archive(files, dialect)
    found = parts_of(open_format("tar", RAW), data, parts)
    assert values(found) == expected(files)


def test_a_border_at_every_block_of_long_names() -> None:
    files = [("b" * 200 + f"{n}.x", b"1") for n in range(4)]
    files.insert(2, ("big.x", bytes(300_000)))
    for dialect in DIALECTS[1:]:
        data = archive(files, dialect)
        scan = SampleScan()
        for at in range(0, 8192, 512):
            found = [asyncio.run(scan.samples_in(Held(data), *ends)).samples
                     for ends in ((0, at), (at, len(data)))]  # fmt: skip
            assert [one.key for some in found for one in some] == [n[:-2] for n, _ in files]


def test_names() -> None:
    assert sample_key_and_extension("a/b.c/d.tar.gz") == ("a/b.c/d", "tar.gz")
    assert sample_key_and_extension("./x.JPG") == ("./x", "jpg")
    for name in ("a/.hidden", "README", "a.b/c", "__meta__/x.json", "__index__.json", "x.", ""):
        assert sample_key_and_extension(name) is None


def test_what_is_no_file_is_of_no_sample_and_divides_none() -> None:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as opened:
        opened.addfile(info("a.jpg", 3), io.BytesIO(b"jpg"))
        for name, kind in (("d.d/", tarfile.DIRTYPE), ("a.lnk", tarfile.SYMTYPE),
                           ("a.hard", tarfile.LNKTYPE), ("a.fifo", tarfile.FIFOTYPE)):  # fmt: skip
            opened.addfile(info(name, kind=kind))
        opened.addfile(info(".hidden", 700), io.BytesIO(bytes(700)))
        opened.addfile(info("a.txt", 3), io.BytesIO(b"txt"))
        opened.addfile(info("../../etc/passwd.txt", 1), io.BytesIO(b"x"))
    found = values(visited(open_format("tar", {}), Held(made.getvalue())))
    assert found == [
        {"__key__": "a", "jpg": b"jpg", "txt": "txt"},
        {"__key__": "../../etc/passwd", "txt": "x"},
    ]


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def test_values_by_extension() -> None:
    files = {
        "npy": npy(np.arange(6, dtype=">f4").reshape(2, 3)),
        "json": json.dumps({"a": 1}).encode(),
        "box.json": b"[[1, 2], [3, 4]]",
        "txt": "é".encode(),
        "cls": b" 7\n",
        "id": b"-1",
        "seg.PNG": b"\x89PNG",
        "pyd": b"cos\nsystem\n(S'exit 1'\ntR.",
    }
    data = archive([(f"k.{ext}", content) for ext, content in files.items()])
    ((found, _, _),) = visited(open_format("tar", {}), Held(data))
    assert found["npy"].dtype == np.dtype("<f4")
    assert found["npy"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert found["box.json"].tolist() == [[1, 2], [3, 4]]
    assert (found["json"], found["txt"], found["__key__"]) == ('{"a":1}', "é", "k")
    assert (int(found["cls"]), int(found["id"])) == (7, -1)
    assert found["cls"].dtype == np.int64
    assert (found["seg.png"], found["pyd"]) == (b"\x89PNG", files["pyd"])
    some = open_format("tar", {"fields": ["cls", "__key__"]})
    assert values(visited(some, Held(data))) == [{"__key__": "k", "cls": 7}]


@pytest.mark.parametrize(
    ("ext", "content", "why"),
    [
        ("npy", b"what", "expected an .npy file"),
        ("npy", npy(np.array([{}], object)), "Python objects"),
        ("json", b"{", "expected JSON"),
        ("json", b"null", "null"),
        ("txt", b"\xff", "UTF-8"),
        ("cls", b"cat", "64-bit integer"),
        ("cls", b"9" * 19, "64-bit integer"),
    ],
)
def test_a_sample_that_is_not_what_its_extensions_say(
    ext: str, content: bytes, why: str
) -> None:
    files = [("a.txt", b"a"), (f"b.{ext}", content), ("c.txt", b"c")]
    with pytest.raises(PartlyReadError, match=rf"k: b at byte 1,024: {ext}: .*{why}") as caught:
        visited(open_format("tar", {}), Held(archive(files)))
    assert [sample["txt"] for sample, _, _ in caught.value.found] == ["a", "c"]


def test_a_sample_that_lacks_a_field_or_has_it_twice() -> None:
    files = [("a.x", b"a"), ("a.x", b"b"), ("b.x", b"b"), ("c.y", b"c")]
    with pytest.raises(PartlyReadError, match=r"two members x \(and 1 more\)") as caught:
        visited(open_format("tar", {"fields": ["x"]}), Held(archive(files)))
    assert values(caught.value.found) == [{"x": b"b"}]


def test_an_archive_that_is_cut_off() -> None:
    data = archive([("a.x", b"a"), ("b.x", bytes(5000))])
    found, why = seen(data[: 1024 + 512 + 3000])
    assert [sample["__key__"] for sample in found] == ["a"]
    assert "expected 5,000 bytes, found 3,000: the archive is cut off" in why
    found, why = seen(data[:1424])
    assert not found
    assert "byte 1,024 of 1,424, found 400 bytes: it is cut off" in why
    assert len(seen(data[: 1024 + 512 + 5120])[0]) == 2  # without zeros at the end


def seen(data: bytes, **options: Any) -> tuple[list[dict[str, Any]], str]:
    object_format = open_format("tar", {**RAW, **options})
    try:
        rows, why = asyncio.run(read_partly(object_format, Held(data), Visit(0, 1, 0, 0)))
    except FormatError as error:
        return [], str(error)
    return values(rows), str(why or "")


def test_a_damaged_header_costs_what_is_behind_it_in_its_block() -> None:
    files = samples(150)
    data = bytearray(archive(files))
    at = data.index(b"a/000075.jpg")
    data[at + 3] ^= 1
    object_format = open_format("tar", RAW)
    found, why = [], []
    for part in range(20):
        rows, wrong = [], None
        try:
            rows = visited(object_format, Held(bytes(data)), part, 20)
        except PartlyReadError as error:
            rows, wrong = error.found, error
        found += values(rows)
        why += [str(wrong)] if wrong else []
    assert 140 < len(found) < 150
    assert all(sample in expected(files) for sample in found)
    assert f"byte {at:,} of" in why[0]


def test_a_size_that_is_not_so_costs_nothing() -> None:
    header = bytearray(archive([("a.x", b"")])[:512])
    header[124:136] = b"\x80" + (1 << 80).to_bytes(11, "big")
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    held = Held(bytes(header) + bytes(3_000_000))
    with pytest.raises(PartlyReadError, match="found 3,000,000: the archive is cut off"):
        visited(open_format("tar", RAW), held, 0, 30)
    assert sum((stop or 0) - start for start, stop in held.asked) < 300_000


def test_large_sizes_and_the_oldest_dialect_are_read() -> None:
    data = bytearray(archive([("a.x", b"abc"), ("b.x", b"d")], tarfile.USTAR_FORMAT))
    for at in (0, 1024):
        data[at + 124 : at + 136] = b"\x80" + bytes(10) + (b"\3", b"\1")[at > 0]
        data[at + 156 : at + 512] = bytes(356)  # neither a type nor a magic
        data[at + 148 : at + 156] = b" " * 8
        data[at + 148 : at + 156] = b"%06o\0 " % sum(data[at : at + 512])
    assert [sample["x"] for sample in seen(bytes(data))[0]] == [b"abc", b"d"]


def test_sparse_files_are_no_content() -> None:
    headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "b.x"}
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as opened:
        sparse = info("GNUSparseFile.0/b.x", 512)
        sparse.pax_headers = headers
        opened.addfile(sparse, io.BytesIO(bytes(512)))
        opened.addfile(info("c.x", 1), io.BytesIO(b"c"))
    found, why = seen(made.getvalue())
    assert [sample["__key__"] for sample in found] == ["c"]
    assert "b at byte 0: x: it is a sparse file" in why


def test_archives_put_together_and_within_each_other_need_an_index() -> None:
    files = samples(60)
    inner = archive(samples(40))
    both = archive([*files, ("z.tar", inner)]) + archive([("y.x", b"1"), *files])
    wanted = expected([*files, ("z.tar", inner), ("y.x", b"1"), *files])
    indexed = open_format("tar", {**RAW, "index": True})
    for parts in (1, 2, 7):
        assert values(parts_of(indexed, both, parts)) == wanted
    assert seen(both)[0] == wanted  # in one part, too
    said = []
    for part in range(9):
        try:
            visited(open_format("tar", RAW), Held(both), part, 9)
        except FormatError as error:
            said.append(str(error))
    assert said
    assert all("set index: true in source.options" in text for text in said)


def test_a_visit_asks_for_little_more_than_its_block() -> None:
    data = archive(samples(1200))
    object_format = open_format("tar", RAW)
    for part in (0, 5, 19):
        held = Held(data)
        assert visited(object_format, held, part, 20)
        read = sum((stop or 0) - start for start, stop in held.asked)
        assert len(held.asked) == 1
        assert read < len(data) // 20 + 120_000


def test_large_samples_cost_little_more_than_they_have() -> None:
    data = archive(samples(120, 100_000))
    object_format = open_format("tar", RAW)
    parts = 120 // 24
    visited(object_format, Held(data), 0, parts)
    held = Held(data)
    found = [row for part in range(parts) for row in visited(object_format, held, part, parts)]
    assert len(found) == 120
    assert sum((stop or 0) - start for start, stop in held.asked) < 1.075 * len(data)
    assert len(held.asked) < 2 * parts


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b" * 120, "c\n" * 60, "d" * 5_000, "e\n" * 4_500]),
            st.sampled_from([b"", b"x\n" * 6_000, b"no end" * 900, bytes(3_000), b"\n"]),
        ),
        min_size=3,
        max_size=8,
    ),
    st.sampled_from(DIALECTS[1:]),
)
def test_a_border_within_names_longer_than_what_is_read_before_it(
    made: list[tuple[str, bytes]], dialect: int
) -> None:
    files = [(f"{name}{n}.x", data) for n, (name, data) in enumerate(made)]
    data = archive([("big.x", bytes(300_000)), *files], dialect)
    scan = SampleScan()
    for at in range(300_000, len(data), 1536):
        found = [asyncio.run(scan.samples_in(Held(data), *ends)).samples
                 for ends in ((0, at), (at, len(data)))]  # fmt: skip
        keys = [one.key for some in found for one in some]
        assert keys == ["big", *(name[:-2] for name, _ in files)]


def test_measured_by_spots_and_taken_from_stretches() -> None:
    data = archive(samples(1200))
    object_format = open_format("tar", RAW)
    held = Held(data)
    measure = asyncio.run(object_format.measure(held))
    assert abs(measure.samples - 1200) < 60
    assert measure.together > 16
    held = Held(data)
    assert len(visited(object_format, held, take=3)) == 3
    assert sum((stop or 0) - start for start, stop in held.asked) < len(data) // 4
    index = open_format("tar", {**RAW, "index": True})
    held = Held(archive([(f"{n}.x", bytes(100_000)) for n in range(20)]))
    assert asyncio.run(index.measure(held)).samples == 20
    assert sum((stop or 0) - start for start, stop in held.asked) < 400_000


def test_compressed_archives(tmp_path: Path) -> None:
    files = samples(20)
    data = gzip.compress(archive(files))
    object_format = open_format("tar", RAW, ["s3://b/a-*.tar.gz"])
    assert not object_format.ranged
    assert values(visited(object_format, Held(data))) == expected(files)
    with pytest.raises(FormatError, match="set compression: gzip"):
        visited(open_format("tar", RAW), Held(data))


def test_a_function_of_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tar_user.py").write_text(
        "def make(data):\n"
        "    if data['__key__'] == 'b':\n"
        "        return None\n"
        "    return {'n': len(data['x']), 'key': data['__key__']}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    object_format = open_format("tar", {"decode": "tar_user:make"})
    data = archive([("a.x", b"aa"), ("b.x", b""), ("c.x", b"ccc")])
    assert values(visited(object_format, Held(data))) == [
        {"n": 2, "key": "a"},
        {"n": 3, "key": "c"},
    ]
    assert object_format.code_digest
    sys.modules.pop("tar_user")


@pytest.mark.parametrize("text", [b"x", b"9 a=b", b"3 a", b"5 a=\nx", b"0 =", b"99 a=b\n"])
def test_pax_headers_that_are_none(text: bytes) -> None:
    assert pax_records(text) is None


def test_images_are_decoded_if_asked_for() -> None:
    image = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    image.new("RGB", (4, 3), (255, 0, 0)).save(file, "PNG")
    object_format = open_format("tar", {"decode": "images"})
    ((found, _, _),) = visited(object_format, Held(archive([("a.seg.png", file.getvalue())])))
    assert found["seg.png"].shape == (3, 4, 3)
    with pytest.raises(PartlyReadError, match=r"k: a at byte 0: png: it: cannot be decoded"):
        visited(object_format, Held(archive([("a.png", b"\x89PNG")])))


# It does not close the files that it reads.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("compressed", [False, True])
def test_what_webdataset_writes_is_what_it_reads(tmp_path: Path, compressed: bool) -> None:
    wds = pytest.importorskip("webdataset")
    path = tmp_path / ("a.tar.gz" if compressed else "a.tar")
    with wds.TarWriter(str(path)) as writer:
        for n in range(30):
            writer.write({
                "__key__": f"train.x/{'n' * n * 8}{n:03}", "cls": n, "txt": f"é{n}", "seg.png": b"p",
                "npy": np.full((n, 2), n, "f4"), "json": {"n": [n]}, "bin": bytes([n]),
            })  # fmt: skip
    object_format = open_format("tar", {}, [str(path)])
    found = values(parts_of(object_format, path.read_bytes(), 1 if compressed else 7))
    theirs = list(wds.WebDataset(str(path), shardshuffle=False).decode())
    assert len(found) == len(theirs) == 30
    for ours, one in zip(found, theirs, strict=True):
        assert ours["__key__"] == one["__key__"]
        assert set(ours) == {name for name in one if name[:2] != "__" or name == "__key__"}
        assert int(ours["cls"]) == one["cls"]
        assert (ours["npy"] == one["npy"]).all()
        assert json.loads(ours["json"]) == one["json"]
        assert (ours["txt"], ours["bin"]) == (one["txt"], one["bin"])
