"""What the lists of a tf.train.SequenceExample become."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from growcache.errors import FormatError
from growcache.formats import open_format
from tests.formats.held import Held, visited
from tests.formats.test_tfrecord import example, feature_message, file, message


def sequence(context: Mapping[str, Any], lists: Mapping[str, list[Any]]) -> bytes:
    entries = b""
    for name, steps in lists.items():
        values = b"".join(message(1, feature_message(step)) for step in steps)
        entries += message(1, message(1, name.encode()) + message(2, values))
    return (example(context) if context else b"") + message(2, entries)


LISTS: dict[str, list[Any]] = {
    "even": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]],
    "single": [7, 8, -9],
    "uneven": [[1, 2], [], [3]],
    "frames": [b"\xff\xd8ab", b"\xff\xd8", b""],
    "quantized": [b"\0\1\2\3", b"\4\5\6\7"],
    "words": ["é".encode(), b"b"],
    "nothing": [],
    "hollow": [[], []],
}


def read(record: bytes, **options: Any) -> dict[str, Any]:
    ((sample, _, _),) = visited(open_format("tfrecord", options), Held(file([record])))
    return sample


def only(*names: str, wishes: Any = None, **options: Any) -> dict[str, Any]:
    record = sequence({"label": 3}, {name: LISTS[name] for name in names})
    return read(record, **options, **({} if wishes is None else {"features": wishes}))


@pytest.mark.parametrize("decode", [{}, {"decode": "sequence_example"}])
def test_lists_as_they_are_found(decode: dict[str, Any]) -> None:
    found = only("even", "single", "uneven", "frames", **decode)
    assert found["even"].tolist() == LISTS["even"]
    assert (found["even"].dtype.str, int(found["label"])) == ("<f4", 3)
    assert (found["single"].dtype.str, found["single"].tolist()) == ("<i8", [7, 8, -9])
    assert (found["uneven"].tolist(), found["uneven_steps"].tolist()) == ([1, 2, 3], [2, 0, 1])
    assert (found["frames"].dtype.str, found["frames"].tobytes()) == (
        "|u1",
        b"\xff\xd8ab\xff\xd8",
    )
    assert found["frames_steps"].tolist() == [4, 2, 0]
    assert len(found) == 7


def test_encoded_steps_of_one_length_are_as_those_of_others() -> None:
    found = only("quantized")
    assert (found["quantized"].tolist(), found["quantized_steps"].tolist()) == (
        [*range(8)],
        [4, 4],
    )


@pytest.mark.parametrize(
    ("name", "what", "expected"),
    [
        ("even", ["float64", None, 2], LISTS["even"]),
        ("even", ["float32", 3, None], LISTS["even"]),
        ("single", ["int32", None], [7, 8, -9]),
        ("single", ["int64", None, 1], [[7], [8], [-9]]),
        ("quantized", ["uint8", None, 2, 2], [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]),
        ("quantized", ["int16", None, 2], [[0x100, 0x302], [0x504, 0x706]]),
        ("quantized", "uint8", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("nothing", ["float32", None, 4], np.empty((0, 4)).tolist()),
        ("nothing", "int64", []),
    ],
)  # fmt: skip
def test_lists_are_named(name: str, what: Any, expected: Any) -> None:
    found = only(name, wishes={name: what})
    assert list(found) == [name]
    assert found[name].tolist() == expected
    dtype = what if isinstance(what, str) else what[0]
    assert found[name].dtype == dtype


@pytest.mark.parametrize(
    ("name", "flat", "steps"),
    [("even", [1, 2, 3, 4, 5, 6], [2, 2, 2]), ("uneven", [1, 2, 3], [2, 0, 1]), ("nothing", [], []), ("hollow", [], [0, 0])],
)  # fmt: skip
def test_lists_of_any_lengths_are_named(name: str, flat: list[int], steps: list[int]) -> None:
    found = only(name, wishes={name: ["float32", None, None]})
    assert (found[name].dtype.str, found[name].tolist()) == ("<f4", flat)
    assert (found[f"{name}_steps"].dtype.str, found[f"{name}_steps"].tolist()) == ("<i8", steps)


def test_a_list_of_texts_is_json() -> None:
    assert json.loads(only("words", wishes={"words": "str"})["words"]) == ["é", "b"]
    assert only("frames", wishes={"frames": "bytes"})["frames_steps"].tolist() == [4, 2, 0]


@pytest.mark.parametrize(
    ("record", "options", "words"),
    [
        (sequence({}, {"x": [[1], [2.0]]}), {}, "steps of one kind, found float32 and int64"),
        (sequence({}, {"x": []}), {}, "feature 'x': is a list without values; say its dtype"),
        (sequence({}, {"x": [[]]}), {}, "say its dtype in source.options.features"),
        (sequence({"x": 1}, {"x": [1]}), {}, "'x' names a feature of the context and a list"),
        (sequence({}, {"x": [[b"a", b"b"]]}), {}, "expected one value of bytes, found 2"),
        (sequence({}, {"x": [[1, 2], [3]]}), {"features": {"x": ["int64", None, 2]}},
         r"steps of one length, found 1 to 2 values; \[int64, null, null\] gives all"),
        (sequence({}, {"x": [[1, 2]] * 2}), {"features": {"x": ["int64", None]}}, "found 2 steps"),
        (sequence({}, {"x": [[1], [2, 3]], "x_steps": [1]}), {}, "two fields would be named 'x_steps'"),
        (sequence({}, {"x": [1]}), {"decode": "example"},
         "found a SequenceExample with the list 'x'; leave decode out"),
        (example({"x": [1, 2]}), {"features": {"x": ["int64", None, None]}}, "is not a list of features"),
        (sequence({}, {"x": [b"\xff"]}), {"features": {"x": "str"}}, "feature 'x': 'utf-8'"),
    ],
)  # fmt: skip
def test_lists_that_are_something_else(
    record: bytes, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(FormatError, match=words) as caught:
        read(record, **options)
    assert "\n" not in str(caught.value)


def test_an_example_is_a_sequence_without_lists() -> None:
    record = example({"x": 5})
    for decode in ("auto", "example", "sequence_example"):
        assert int(read(record, decode=decode)["x"]) == 5


def test_a_bomb_of_steps_is_refused_before_it_is_parsed() -> None:
    record = message(2, message(1, message(2, b"\x0a\x00" * 600_000)))
    with pytest.raises(FormatError, match="more than 262,144 fields"):
        read(record)


def test_a_cache_of_before_keeps_to_the_context() -> None:
    """Its samples have no lists: every other one was a hole after the update."""
    names = {"even": LISTS["even"], "uneven": LISTS["uneven"]}
    held = Held(file([sequence({"label": 3}, names)]))
    for cached, expected in (
        (["label"], ["label"]),
        (["label", "uneven", "uneven_steps"], ["label", "uneven", "uneven_steps"]),
        (["even"], ["even", "label"]),  # what the context has, a cache has
    ):
        reader = open_format("tfrecord", {})
        reader.follow_fields(cached)
        ((sample, _, _),) = visited(reader, held)
        assert sorted(sample) == expected
