"""Format jsonl: which lines are whose, what their values become, and what is refused."""

from __future__ import annotations

import asyncio
import gzip
import json
import sys
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from growcache.errors import ConfigError, FormatError
from growcache.formats import COMPRESSIBLE, open_format
from growcache.formats.base import PartlyReadError, Visit, read_partly
from tests.formats.held import Held, visited


def lines(count: int, width: int = 0) -> bytes:
    return b"".join(
        b'{"n": %d, "t": "%s"}\n' % (n, b"x" * (width * (n % 7))) for n in range(count)
    )


def only(text: str | bytes, options: dict[str, Any] | None = None) -> dict[str, Any]:
    data = text.encode() if isinstance(text, str) else text
    ((sample, start, stop),) = visited(open_format("jsonl", options or {}), Held(data))
    assert data[start:stop].rstrip() == data.removeprefix(b"\xef\xbb\xbf").strip()
    return sample


@given(
    st.lists(
        st.tuples(
            st.sampled_from([0, 0, 1, 2, 50, 9000]), st.sampled_from([b"\n", b"\r\n", b"\n\n"])
        ),
        max_size=12,
    ),
    # No gzip, which would be refused.
    st.binary(max_size=3).map(lambda b: b.translate(bytes.maketrans(b"\n\x1f", b"__"))),
    st.integers(1, 9),
)
def test_each_line_is_of_one_part(
    sizes: list[tuple[int, bytes]], last: bytes, parts: int
) -> None:
    data = b"".join(b"x" * size + end for size, end in sizes) + last
    object_format = open_format("jsonl", {"raw": True})
    expected = [line for line in data.replace(b"\r\n", b"\n").split(b"\n") if line.strip()]
    whole = visited(object_format, Held(data))
    assert [sample["data"].rstrip(b"\r") for sample, _, _ in whole] == [
        line.rstrip(b"\r") for line in expected
    ]
    for sample, start, stop in whole:
        assert data[start:stop] == sample["data"]
    for count in (1, 2, parts, min(40, len(data) + 1)):
        assert [
            row
            for part in range(count)
            for row in visited(object_format, Held(data), part, count)
        ] == whole


def test_a_visit_reads_its_lines_and_little_more() -> None:
    held = Held(lines(20_000, 30))
    object_format = open_format("jsonl", {})
    measure = asyncio.run(object_format.measure(held))
    parts = -(-measure.samples // measure.together)
    assert abs(measure.samples - 20_000) < 500
    assert 5 < parts < 30
    held.asked.clear()
    used = 0
    for part in range(parts):
        used += sum(
            stop - start for _, start, stop in visited(object_format, held, part, parts)
        )
    fetched = sum((stop or 0) - start for start, stop in held.asked)
    assert len(held.asked) == parts
    assert fetched < 1.1 * used


@pytest.mark.parametrize(
    ("sizes", "most"),
    [
        ([16_000] * 1200, 1.05),  # a line in vain of 24
        (np.random.default_rng(0).integers(8_000, 24_000, 1200), 1.07),
        (np.random.default_rng(0).exponential(400, 20_000).astype(int) + 20, 1.02),
    ],
    ids=["equal", "different", "short"],
)
def test_what_is_fetched_of_lines_in_vain(sizes: Any, most: float) -> None:
    held = Held(b"".join(b"x" * (size - 1) + b"\n" for size in sizes))
    object_format = open_format("jsonl", {"raw": True})
    measure = asyncio.run(object_format.measure(held))
    parts = -(-measure.samples // measure.together)
    visited(object_format, held, 0, parts)
    held.asked.clear()
    found = [
        row for part in range(1, parts) for row in visited(object_format, held, part, parts)
    ]
    used = sum(stop - start + 1 for _, start, stop in found)
    assert sum((stop or 0) - start for start, stop in held.asked) < most * used


def test_what_is_ahead_of_a_block_is_learnt() -> None:
    held = Held(lines(4000, 300))
    object_format = open_format("jsonl", {})
    for part in range(100):
        visited(object_format, held, part, 100)
    assert len(held.asked) < 120


def test_a_long_line_is_read_on_in_growing_steps() -> None:
    held = Held(b'{"t": "' + b"x" * 3_000_000 + b'"}\n{"t": "y"}\n')
    object_format = open_format("jsonl", {})
    ((sample, start, stop),) = visited(object_format, held, 0, 1000)
    assert (len(sample["t"]), start, stop) == (3_000_000, 0, 3_000_009)
    assert len(held.asked) < 9
    assert held.asked[-1][1] == len(held.data)
    held.asked.clear()
    assert visited(object_format, held, 500, 1000) == []
    assert len(held.asked) == 1
    assert visited(object_format, held, 999, 1000)[0][1] == 3_000_010


def test_a_line_that_no_sampler_can_hold_is_refused() -> None:
    class Endless(Held):
        async def read(self, start: int = 0, stop: int | None = None) -> bytes:
            self.asked.append((start, stop))
            return b"x" * ((stop or 0) - start)

    held = Endless(b"", size=1 << 40)
    object_format = open_format("jsonl", {})
    with pytest.raises(
        FormatError, match="k: a line may have at most 33,554,432 bytes, but the"
    ):
        visited(object_format, held, 0, 1 << 20)
    assert (held.asked[-1][1] or 0) < 1 << 26
    with pytest.raises(FormatError, match="may read at most 500,000,000 bytes"):
        visited(object_format, held)


@pytest.mark.parametrize(
    ("text", "value", "kind"),
    [
        ("3", 3, "int64"),
        ("-9223372036854775808", -(2**63), "int64"),
        ("3.0", 3.0, "float64"),
        ("1e3", 1000.0, "float64"),
        ("NaN", np.nan, "float64"),
        ("-Infinity", -np.inf, "float64"),
        ("true", True, "bool"),
        ("[1, 2]", [1, 2], "int64"),
        ("[1, 2.5]", [1, 2.5], "float64"),
        ("[NaN, 1]", [np.nan, 1], "float64"),
        ("[]", [], "float64"),
        ("[true, false]", [True, False], "bool"),
        ("[[1, 2], [3, 4]]", [[1, 2], [3, 4]], "int64"),
        ("[[], []]", [[], []], "float64"),
    ],
)
def test_numbers_and_lists_of_them(text: str, value: Any, kind: str) -> None:
    found = only(f'{{"v": {text}}}')["v"]
    np.testing.assert_array_equal(found, np.array(value, kind))
    assert found.dtype == kind
    assert found.shape == np.shape(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('"é\\u00e9\\n"', "éé\n"),
        ('""', ""),
        ('{"a": [1, null]}', '{"a":[1,null]}'),
        ('["a", 1]', '["a",1]'),
        ("[1, null]", "[1,null]"),
        ("[[1], [2, 3]]", "[[1],[2,3]]"),
        ("[[1], 2]", "[[1],2]"),
        ("[true, 1]", "[true,1]"),
        ("[" * 40 + "]" * 40, "[" * 40 + "]" * 40),
    ],
)
def test_texts_and_what_is_kept_as_json(text: str, value: str) -> None:
    assert only(f'{{"v": {text}}}') == {"v": value}


def test_odd_but_legal() -> None:
    assert int(only(b'\xef\xbb\xbf{"a": 1}\r\n')["a"]) == 1
    assert int(only('\n \t\r\n{"a": 1, "a": 2}  ')["a"]) == 2  # the last one counts
    assert visited(open_format("jsonl", {}), Held(b"")) == []
    assert visited(open_format("jsonl", {}), Held(b"\xef\xbb\xbf\n\n \r\n")) == []


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{", "expected JSON, found b'{'"),
        (b"[1]", "expected a JSON object with keys, found b'\\[1\\]'; raw: true"),
        (b"{}", "expected a JSON object with keys"),
        (b"3", "expected a JSON object"),
        (b'{"a": "\xff"}', "expected JSON"),
        (b'{"a": "\\ud800"}', "expected JSON"),
        (b'{"a": NaN, "b": "\xff"}', "expected JSON"),
        (b'{"a": null}', "expected a value for 'a', found null; name the fields, with a de"),
        (b'{"a": 9223372036854775808}', "a: 9223372036854775808 is not a 64-bit integer"),
        (b'{"a": [9223372036854775808]}', "a: "),
        (b'{"a": NaN, "b": 1' + b"0" * 30 + b"}", "is not a 64-bit integer"),
        (b'{"a": 1e400}', "expected JSON"),
        (b'{"a": ' + b"[" * 5000 + b"NaN", "expected JSON"),
        (b"{" + b",".join(b'"%d":1' % n for n in range(10_001)) + b"}", "at most 10,000 keys"),
        (b"\x1f\x8b\x08 and more", "is compressed by gzip; set compression: gzip"),
        (b"\x28\xb5\x2f\xfd", "is compressed by zstd"),
    ],
)
def test_a_bad_line_is_named(line: bytes, words: str) -> None:
    with pytest.raises(FormatError, match=words) as caught:
        visited(open_format("jsonl", {}), Held(line + b"\n"))
    assert str(caught.value).startswith("k: ")
    assert "\n" not in str(caught.value)


def test_bad_lines_cost_themselves_only() -> None:
    data = b'{"a": 1}\n{"a": \n{"a": 3}\nnull\n'
    object_format = open_format("jsonl", {})
    with pytest.raises(PartlyReadError, match=r"k: the line at byte 9: .* \(and 1 more"):
        visited(object_format, Held(data))
    found, why = asyncio.run(read_partly(object_format, Held(data), Visit(0, 1, 0, 0)))
    assert [(int(sample["a"]), start) for sample, start, _ in found] == [(1, 0), (3, 16)]
    assert why is not None


FIELDS = {
    "id": "str",
    "score": "float32",
    "label": {"path": "meta.label", "dtype": "int16", "default": -1},
    "where": "meta.where",
    "x": {"dtype": "float32", "default": []},
}


def test_fields_are_named() -> None:
    text = '{"id": 7, "score": 1, "meta": {"label": 3.0, "where": "there"}, "x": [1, null], "y": 0}'
    found = only(text, {"fields": FIELDS})
    assert {name: getattr(value, "dtype", str) for name, value in found.items()} == {
        "id": str,
        "score": np.float32,
        "label": np.int16,
        "where": str,
        "x": np.float32,
    }
    assert (found["id"], float(found["score"]), int(found["label"])) == ("7", 1.0, 3)
    np.testing.assert_array_equal(found["x"], np.array([1, np.nan], np.float32))
    text = '{"id": "a", "score": NaN, "meta": {"label": null, "where": 5}}'
    found = only(text, {"fields": FIELDS})
    assert (int(found["label"]), int(found["where"]), found["x"].shape) == (-1, 5, (0,))
    listed = only('{"a": 1, "b": null, "c": "x"}', {"fields": ["c", "a"]})
    assert listed == {"c": "x", "a": np.array(1)}
    dotted = {"v": {"path": ["a.b", "c"]}}
    assert only('{"a.b": {"c": "z"}}', {"fields": dotted}) == {"v": "z"}


@pytest.mark.parametrize(
    ("dtype", "text", "value"),
    [
        ("int64", "3.0", np.int64(3)),
        ("uint64", "18446744073709551615", np.uint64(2**64 - 1)),
        ("uint64", "[18446744073709551615]", np.array([2**64 - 1], np.uint64)),
        ("uint8", "[true, false]", np.array([1, 0], np.uint8)),
        ("bool", "true", np.bool_(True)),
        ("float16", "1e9", np.float16(np.inf)),
        ("float64", "12345678901234567890", np.float64(12345678901234567890)),
        ("bytes", '"é"', "é".encode()),
        ("base64", '"AAEC"', b"\0\1\2"),
        ("json", '"a"', '"a"'),
        ("json", "null", "null"),
        ("str", "[1,null]", "[1,null]"),
    ],
)
def test_dtypes(dtype: str, text: str, value: Any) -> None:
    found = only(f'{{"v": {text}}}', {"fields": {"v": dtype}})["v"]
    np.testing.assert_array_equal(found, value)
    if not isinstance(value, str | bytes):
        assert found.dtype == value.dtype


@pytest.mark.parametrize(
    ("dtype", "text", "words"),
    [
        ("int64", "3.5", "not integers"),
        ("int64", "1e300", "beyond 2\\^53"),
        ("int64", "18446744073709551616", "beyond 2\\^53"),
        ("int64", "NaN", "not integers"),
        ("int8", "200", "found 200"),
        ("int8", "[0, 200]", "from 0 to 200"),
        ("uint8", "[-1]", "from -1 to -1"),
        ("uint64", "[-1]", "v: expected uint64"),
        ("bool", "1", "found numbers"),
        ("float32", '"1.5"', 'found "1.5"'),
        ("float32", '["1.5"]', "list of something else"),
        ("float32", "[[1], [2, 3]]", "unevenly nested"),
        ("int32", "[1, null]", "list of something else"),
        ("base64", '"AAE"', "Incorrect padding"),
        ("bytes", "3", "found 3"),
        ("float32", "null", "expected a value for 'v', found null; give it a default"),
        ("str", "null", "found null"),
    ],
)
def test_values_that_are_not_of_the_dtype(dtype: str, text: str, words: str) -> None:
    with pytest.raises(FormatError, match=words):
        only(f'{{"v": {text}}}', {"fields": {"v": dtype}})
    with pytest.raises(FormatError, match=r"'w\.a', found no such key"):
        only(f'{{"v": {text}}}', {"fields": {"v": {"path": "w.a"}}})


def test_a_list_with_a_long_text_takes_no_more_memory_than_it_has() -> None:
    text = json.dumps({"v": ["a"] * 100_000 + ["b" * 100_000]})
    assert only(text)["v"] == json.dumps(["a"] * 100_000 + ["b" * 100_000]).replace(" ", "")


PACKED: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "zlib": zlib.compress,
    "zstd": zstandard.ZstdCompressor().compress,
}


@pytest.mark.parametrize("kind", PACKED)
def test_compressed_lines(kind: str) -> None:
    data = lines(300, 20)
    object_format = open_format("jsonl", {"compression": kind})
    whole = visited(open_format("jsonl", {}), Held(data))
    packed = PACKED[kind](data)
    twice = PACKED[kind](data[:1000]) + PACKED[kind](data[1000:])
    assert not object_format.ranged
    for one in (packed, twice):
        held = Held(one)
        assert visited(object_format, held) == whole
        assert held.asked == [(0, None)]
        measure = asyncio.run(object_format.measure(held))
        assert (measure.samples, measure.together) == (300, 1)
    assert len(visited(object_format, Held(packed), take=5)) == 5
    for damaged in (packed[:-9], packed[:20], b"", b"no " + packed):
        with pytest.raises(FormatError, match=r"^k: ") if damaged else nullcontext():
            visited(object_format, Held(damaged))
    assert visited(object_format, Held(packed + bytes(50_000))) == whole  # as tapes pad
    with pytest.raises(FormatError, match="expected an object compressed by"):
        visited(object_format, Held(packed + b"and more"))


@pytest.mark.parametrize(
    ("urls", "ranged"),
    [
        (["s3://b/*.jsonl.gz"], False),
        (["s3://b/a.jsonl.ZST", "s3://b/c.zst"], False),
        (["s3://b/*.jsonl"], True),
        (["s3://b/**"], True),
    ],
)
def test_names_tell_how_objects_are_compressed(urls: list[str], ranged: bool) -> None:
    assert open_format("jsonl", {}, urls).ranged == ranged


@pytest.mark.parametrize("form", COMPRESSIBLE)
def test_a_compressed_object_that_is_too_large_is_refused_before_it_is_read(form: str) -> None:
    held = Held(gzip.compress(b"x"), "big.gz", size=600_000_000)
    cut = {"axis": 0} if form == "nifti" else {}
    opened = open_format(form, {"compression": "gzip", **cut})
    words = "big.gz: .* to at most 500,000,000 bytes in memory, found 600,000,000 compressed ones; make"
    for ask in (lambda: asyncio.run(opened.measure(held)), lambda: visited(opened, held)):
        with pytest.raises(FormatError, match=words):
            ask()
    assert not held.asked


@pytest.mark.parametrize("kind", PACKED)
def test_a_bomb_is_refused(kind: str) -> None:
    zeros = bytes(300_000_000) if kind == "zstd" else bytes(20_000_000)
    bomb = PACKED[kind](zeros)
    if kind != "zstd":
        bomb = PACKED[kind](bomb)
        object_format = open_format("jsonl", {"compression": kind})
        with pytest.raises(FormatError, match="expected JSON"):
            visited(object_format, Held(bomb))
        return
    with pytest.raises(FormatError, match=r"unpacked to .* bytes in memory, found more; make"):
        visited(open_format("jsonl", {"compression": kind}), Held(bomb))


def test_without_zstandard_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(
        ConfigError, match=r"(?m)needs zstandard; pip install 'growcache\[zstd\]'$"
    ):
        open_format("jsonl", {}, ["s3://b/*.zst"])
    open_format("jsonl", {})


def test_some_lines_of_many_are_read_out_of_few_stretches() -> None:
    held = Held(lines(200_000, 20))
    object_format = open_format("jsonl", {})
    found = visited(object_format, held, take=50)
    assert len(found) == 50
    assert sum((stop or 0) - start for start, stop in held.asked) < len(held.data) / 5
    starts = [start for _, start, _ in found]
    assert starts == sorted(set(starts))
    assert starts != [start for _, start, _ in visited(object_format, held, take=50, round=1)]
