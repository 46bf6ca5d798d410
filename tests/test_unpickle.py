"""Everything that a sound pickle may hold comes back as `pickle.loads` has it."""

from __future__ import annotations

import collections
import io
import pickle
import pickletools
import string
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

import growcache
from growcache import unpickle_arrays
from growcache.errors import FormatError

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)
RECORD = [(("where", "at"), "<f4", (3,)), ("n", ">i2"), ("inner", [("s", "S3"), ("u", "<U2")])]
OBJECTS = {
    "big-endian": np.arange(6, dtype=">i2").reshape(2, 3),
    "fortran order": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    "other order": np.arange(24.0).reshape(2, 3, 4).transpose(1, 0, 2),
    "strided": np.arange(12).reshape(3, 4)[:, ::2],
    "no values": np.zeros((0, 3), np.float16),
    "one value": np.array(3.5),
    "text": np.array(["ab", "c\u00e9"]),
    "byte strings": np.array([b"ab", b"c"]),
    "empty text": np.zeros(2, "U0"),
    "dates": np.zeros(2, "M8[25s]"),
    "spans": np.zeros(2, ">m8[ns]"),
    "spans of no unit": np.zeros(2, "m8"),
    "bytes of no meaning": np.zeros(2, "V3"),
    "long numbers": np.zeros(2, np.longdouble),
    "records": np.zeros(2, RECORD),
    "aligned records": np.zeros(2, np.dtype([("a", "i1"), ("b", "f8")], align=True)),
    "a record": np.zeros(1, RECORD)[0],
    "a float": np.float32(2.5),
    "a truth": np.bool_(True),
    "a text": np.str_("ab"),
    "a date": np.datetime64("2020-01-01T00:00", "m"),
    "a dtype": np.dtype(">f4"),
    "read-only": np.frombuffer(b"abcd", np.uint8),
    "plain": [True, None, -5, 1 << 100, -(1 << 70), 300, 70_000, 2.5, 1j, "\u00e9\ud800", b"\xff"],
    "bytearrays": [bytearray(b"abc"), bytearray()],
    "containers": {"l": [(), (1,), (1, 2), (1, 2, 3), (1,) * 4], ("k", 1): {4}, b"f": frozenset("a")},
    "ordered": collections.OrderedDict(b=1, a=np.arange(2)),
    "default": collections.defaultdict(list, {"a": [1]}),
    "empty ones": [{}, set(), frozenset(), b"", "", collections.OrderedDict()],
    "types": [list, set, np.ndarray],
}  # fmt: skip


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray | np.generic):
        one, other = np.asarray(one), np.asarray(other)
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        if one.dtype.names:  # the bytes between aligned fields belong to no field
            return all(same(one[name], other[name]) for name in one.dtype.names)
        return np.asarray(one).tobytes() == np.asarray(other).tobytes()
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) or one != one  # NaN


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", OBJECTS)
def test_what_was_pickled_comes_back(name: str, protocol: int) -> None:
    data = pickle.dumps(OBJECTS[name], protocol)
    for written in (data, pickletools.optimize(data)):
        found, expected = unpickle_arrays(written), pickle.loads(written)
        assert same(found, OBJECTS[name])
        if isinstance(expected, np.ndarray):
            assert isinstance(found, np.ndarray)
            assert found.flags.writeable == expected.flags.writeable
            assert found.flags.f_contiguous == expected.flags.f_contiguous


PLAIN = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.binary(max_size=20)
    | st.text(max_size=20) | st.complex_numbers() | st.binary(max_size=5).map(bytearray)
    | npst.arrays(npst.scalar_dtypes() | npst.array_dtypes(), npst.array_shapes(min_dims=0))
)  # fmt: skip
KEYS = st.text(max_size=5) | st.integers(-(2**63), 2**63 - 1) | st.binary(max_size=3)
NESTED = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.sets(KEYS, max_size=4)
        | st.frozensets(KEYS, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=3).map(collections.OrderedDict)
    ),
    max_leaves=12,
)


@settings(deadline=None)
@given(NESTED, st.sampled_from(PROTOCOLS))
def test_anything_of_these_comes_back(value: Any, protocol: int) -> None:
    assert same(unpickle_arrays(pickle.dumps(value, protocol)), value)


def test_what_is_shared_stays_shared() -> None:
    row = [1, 2]
    loop: list[Any] = [row, row, np.arange(3)]
    loop += [loop[2], loop]
    found = unpickle_arrays(pickle.dumps(loop))
    assert isinstance(found, list)
    assert found[0] is found[1]
    assert found[2] is found[3]
    assert found[4] is found


OLD = (  # {"x": np.arange(6, dtype=">i2").reshape(2, 3), "y": np.float32(2.5)}
    # NumPy 1.26, protocol 2
    b"\x80\x02}q\x00(X\x01\x00\x00\x00xq\x01cnumpy.core.multiarray\n_reconstruct\nq\x02cnumpy\n"
    b"ndarray\nq\x03K\x00\x85q\x04c_codecs\nencode\nq\x05X\x01\x00\x00\x00bq\x06X\x06\x00\x00"
    b"\x00latin1q\x07\x86q\x08Rq\t\x87q\nRq\x0b(K\x01K\x02K\x03\x86q\x0ccnumpy\ndtype\nq\rX\x02"
    b"\x00\x00\x00i2q\x0e\x89\x88\x87q\x0fRq\x10(K\x03X\x01\x00\x00\x00>q\x11NNNJ\xff\xff\xff"
    b"\xffJ\xff\xff\xff\xffK\x00tq\x12b\x89h\x05X\x0c\x00\x00\x00\x00\x00\x00\x01\x00\x02\x00"
    b"\x03\x00\x04\x00\x05q\x13h\x07\x86q\x14Rq\x15tq\x16bX\x01\x00\x00\x00yq\x17cnumpy.core."
    b"multiarray\nscalar\nq\x18h\rX\x02\x00\x00\x00f4q\x19\x89\x88\x87q\x1aRq\x1b(K\x03X\x01"
    b"\x00\x00\x00<q\x1cNNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tq\x1dbh\x05X\x04\x00\x00\x00"
    b"\x00\x00 @q\x1eh\x07\x86q\x1fRq \x86Ru.",
    # Python 2.7 with NumPy 1.16, protocol 2
    b"\x80\x02}q\x01(U\x01xcnumpy.core.multiarray\n_reconstruct\nq\x02cnumpy\nndarray\nK\x00\x85"
    b"U\x01b\x87R(K\x01K\x02K\x03\x86cnumpy\ndtype\nq\x03U\x02i2K\x00K\x01\x87R(K\x03U\x01>NNNJ"
    b"\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89U\x0c\x00\x00\x00\x01\x00\x02\x00\x03\x00\x04"
    b"\x00\x05tbU\x01ycnumpy.core.multiarray\nscalar\nh\x03U\x02f4K\x00K\x01\x87R(K\x03U\x01<NNN"
    b"J\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tbU\x04\x00\x00 @\x86Ru.",
)


@pytest.mark.parametrize("data", OLD)
def test_pickles_of_older_versions(data: bytes) -> None:
    found = unpickle_arrays(data)
    wanted = {"x": np.arange(6, dtype=">i2").reshape(2, 3), "y": np.float32(2.5)}
    assert same(found, wanted)


def test_python_2_wrote_text_as_bytes() -> None:
    assert unpickle_arrays(b"S'a\\xe9'\n.") == "a\u00e9"
    assert unpickle_arrays(b"(dp1\nS'k'\nI01\nsS'l'\nL5L\ns.") == {"k": True, "l": 5}
    assert unpickle_arrays(
        b"ccollections\nOrderedDict\n((lp1\n(lp2\nS'a'\naI1\naatR."
    ) == collections.OrderedDict(a=1)


def test_arrays_have_memory_of_their_own() -> None:
    value = np.arange(5.0)
    for protocol in PROTOCOLS:
        found: Any = unpickle_arrays(pickle.dumps([value, value.copy()], protocol))
        found[0] += 1
        assert same(found[1], value)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_kind_of_bytes(kind: Any) -> None:
    assert unpickle_arrays(kind(pickle.dumps([1]))) == [1]
    assert unpickle_arrays(pickle.dumps([1]) + b"behind it") == [1]


class Own:
    pass


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (Own(), r"needs tests\.test_unpickle\.Own, and only arrays"),
        (string.Template("a"), r"string\.Template.*call pickle\.loads in a function of your own"),
        (np.ma.masked_array([1]), r"numpy\.ma\.\w+\._mareconstruct.*plain arrays"),
        (np.zeros(2, [("a", "i4")]).view(np.recarray), r"numpy.*recarray.*plain arrays"),
        (np.array([1, "a", None], object), "array of Python objects"),
        (np.zeros(2, [("a", "O")]), "array of Python objects"),
        (np.float32, r"numpy\.float32"),
        (range(3), r"builtins\.range"),
        ({frozenset("a"): 1}, "frozenset as key"),
        ({2**70: 1}, "int as key"),
        ({"k" * 5000: 1}, "str as key.*very long"),
        ({((("a",),),): 1}, "tuple as key"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_what_else_is_refused_by_name(value: object, words: str, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    if isinstance(value, range) and protocol < 3:
        words = r"__builtin__\.xrange"
    with pytest.raises(FormatError, match=words):
        unpickle_arrays(data)


def test_tensors_are_refused_with_what_to_store_instead() -> None:
    tensor = b"ctorch._utils\n_rebuild_tensor_v2\n(ctorch.storage\n_load_from_bytes\n"
    with pytest.raises(FormatError, match=r"torch\._utils\._rebuild_tensor_v2.*tensor\.numpy"):
        unpickle_arrays(tensor)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "ends too early"),
        (b"\x1f\x8b\x08", "compressed by gzip: decompress"),
        (b"PK\x03\x04", "torch.save"),
        (b"<html>", "starts with b'<html>'"),
        (pickle.dumps([1, "abc"])[:-4], "ends too early"),
        (pickle.dumps(np.arange(4))[:-30], "ends too early"),
        (b"(lp0\n0.", "damaged at byte"),
    ],
)
def test_what_is_no_pickle(data: bytes, words: str) -> None:
    with pytest.raises(FormatError, match=words):
        unpickle_arrays(data)


def test_it_is_a_part_of_growcache_that_imports_little() -> None:
    assert "unpickle_arrays" in growcache.__all__
    code = (
        "import sys, growcache; assert 'numpy' not in sys.modules; growcache.unpickle_arrays;"
        "print([n for n in ('torch', 'tensorflow', 'obstore', 'pydantic') if n in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code]) == b"[]\n"


def test_an_array_in_a_file_of_pickles() -> None:
    file = io.BytesIO()
    pickle.Pickler(file, 4).dump({"x": np.arange(3)})
    assert same(unpickle_arrays(file.getvalue()), {"x": np.arange(3)})
