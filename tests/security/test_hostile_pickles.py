"""Pickles that run code in Python's own reader, and pickles of few bytes that ask for much."""

from __future__ import annotations

import pickle
import struct
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from growcache import unpickle_arrays
from growcache.errors import FormatError
from growcache.pickles import makers

FIRED: list[str] = []
SEEN: list[str] = []
_watching = [False]
HERE = __name__.encode()


def fire(*words: object) -> list[object]:
    """What an attack makes Python run."""
    FIRED.append("fired")
    return []


class Fires:
    """Fires when it is made, called, given a state, or items."""

    def __new__(cls, *_: object) -> Fires:
        fire()
        return super().__new__(cls)

    def __setstate__(self, _: object) -> None:
        fire()


class Reduced:
    def __reduce__(self) -> tuple[Any, ...]:
        return fire, ("words",)


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _watching[0] and event in (
        "import", "exec", "compile", "open", "os.system", "pickle.find_class",
        "object.__getattr__", "object.__setattr__", "subprocess.Popen", "marshal.loads",
    ):  # fmt: skip
        SEEN.append(f"{event} {arguments!r:.80}")


sys.addaudithook(_hook)


@contextmanager
def watched() -> Iterator[None]:
    FIRED.clear()
    SEEN.clear()
    _watching[0] = True
    try:
        yield
    finally:
        _watching[0] = False


def text(value: bytes) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value


def named(module: bytes, name: bytes) -> bytes:
    return text(module) + text(name) + b"\x93"


FIRE = named(HERE, b"fire")
EVAL = text(b"__import__('" + HERE + b"',fromlist=['']).fire()") + b"\x85R."
BLANK = named(b"numpy.core.multiarray", b"_reconstruct") + named(b"numpy", b"ndarray")
BLANK += b"K\x00\x85C\x01b\x87R"
DTYPE = named(b"numpy", b"dtype") + text(b"f4") + b"\x89\x88\x87R"
PLAIN = DTYPE + b"(K\x03" + text(b"<") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"

# Each of these fires in pickle.loads.
REAL = {
    "reduce": pickle.dumps(Reduced()),
    "reduce in a dict": pickle.dumps({"x": np.arange(3), "y": Reduced()}),
    "reduce, protocol 0": pickle.dumps(Reduced(), 0),
    "object array": pickle.dumps(np.array([Reduced()], object)),
    "object array, protocol 2": pickle.dumps(np.array([Reduced()], object), 2),
    "eval": named(b"builtins", b"eval") + EVAL,
    "exec by its old name": b"c__builtin__\neval\n" + EVAL,
    "a name out of parts": b"(" + text(b"builtins") + b"\x940" + text(b"eval") + b"0h\x00"
    + text(b"eval") + b"\x93" + EVAL,
    "getattr chain": named(b"builtins", b"getattr")
    + named(b"importlib", b"import_module") + text(HERE) + b"\x85R" + text(b"fire")
    + b"\x86R)R.",
    "map": named(b"builtins", b"list") + named(b"builtins", b"map") + FIRE + b"]K\x01a\x86R"
    + b"\x85R.",
    "partial": named(b"functools", b"partial") + FIRE + b"\x85R)R.",
    "copyreg": b"ccopyreg\n__newobj__\n" + named(HERE, b"Fires") + b"\x85R.",
    "reconstructor": b"ccopy_reg\n_reconstructor\n(c" + HERE + b"\nFires\nc__builtin__\nobject"
    b"\nNtR}b.",
    "new object": named(HERE, b"Fires") + b")\x81.",
    "new object, keywords": named(HERE, b"Fires") + b")}\x92.",
    "instance": b"(i" + HERE + b"\nFires\n.",
    "object": b"(c" + HERE + b"\nFires\no.",
    "build": named(HERE, b"Fires") + b")\x81}b.",
    "operator": named(b"operator", b"methodcaller") + text(b"fire") + b"\x85R"
    + named(b"importlib", b"import_module") + text(HERE) + b"\x85R\x85R.",
    "default factory": named(b"collections", b"defaultdict") + FIRE + b"\x85R0" + FIRE
    + b")R.",
}  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_attacks_that_python_falls_for(name: str) -> None:
    with watched():
        try:
            pickle.loads(REAL[name])
        except Exception:  # noqa: BLE001 - what matters is that it ran
            assert FIRED
    assert FIRED, "no attack"
    refused(REAL[name])


def refused(data: bytes, words: str = "pickle") -> None:
    with watched(), pytest.raises(FormatError, match=words):
        unpickle_arrays(data)
    assert (FIRED, SEEN) == ([], [])


def state(*parts: bytes) -> bytes:
    return b"(" + b"".join(parts) + b"t"


STATE = state(b"K\x01", b"K\x02\x85", PLAIN, b"\x89", b"C\x08" + bytes(8))
SETTERS = text(b"__defaults__") + b"K\x01\x85s"
REFUSED = {
    "state for a list": (b"]}b.", "sets attributes of a list"),
    "state for a dict": (b"}}" + text(b"__class__") + b"Nsb.", "sets attributes of a dict"),
    "state for a function of ours": (
        named(b"_codecs", b"encode") + b"N}" + SETTERS + b"\x86b.", "attributes of a function"
    ),
    "state for a class": (named(b"numpy", b"ndarray") + b"N}\x86b.", "attributes of a type"),
    "state for a finished array": (BLANK + STATE + b"b" + STATE + b"b.", "of a ndarray"),
    "state for a finished dtype": (PLAIN + b"N}\x86b.", "sets attributes of a"),
    "dict as state of an array": (BLANK + b"}" + text(b"shape") + b"Nsb.", "damaged"),
    "an array without state": (BLANK + b".", "without its values"),
    "a list of one": (b"]" + BLANK + b"a.", "without its values"),
    "an array used before its state": (BLANK + b"\x94h\x00.", "before it has values"),
    "an array twice before its state": (BLANK + b"2.", "damaged"),
    "more values than bytes": (
        BLANK + state(b"K\x01", b"M\xff\xff\x85", PLAIN, b"\x89", b"C\x00") + b"b.", "damaged"
    ),
    "negative shape": (
        BLANK + state(b"K\x01", b"J\xfe\xff\xff\xffJ\xff\xff\xff\xff\x86", PLAIN, b"\x89",
                      b"C\x08" + bytes(8)) + b"b.", "damaged",
    ),
    "dtype of objects": (DTYPE.replace(b"f4", b"O8") + state(b"K\x03", text(b"|"), b"NNN"
                         b"J\xff\xff\xff\xffJ\xff\xff\xff\xffK\x3f") + b"b.", "Python objects"),
    "dtype that is evaluated": (named(b"numpy", b"dtype") + text(b"i4,i4") + b"\x89\x88\x87R"
                                + state(b"K\x03", text(b"<"), b"NNNNNN") + b"b.", "damaged|dtype"),
    "scalar of objects": (
        named(b"numpy.core.multiarray", b"scalar") + DTYPE.replace(b"f4", b"O8")
        + state(b"K\x03", text(b"|"), b"NNN", b"K\x08K\x08K\x3f") + b"b" + b"]\x86R.",
        "Python objects",
    ),
    "array of a subclass": (
        named(b"numpy.core.multiarray", b"_reconstruct") + named(b"numpy", b"matrix"), "matrix"
    ),
    "array of another class that is known": (
        named(b"numpy.core.multiarray", b"_reconstruct") + named(b"builtins", b"set")
        + b"K\x00\x85C\x01b\x87R.", "damaged"
    ),
    "other codecs": (
        named(b"_codecs", b"encode") + text(b"a") + text(b"rot13") + b"\x86R.", "damaged"
    ),
    "calls of what is called by nobody": (named(b"builtins", b"list") + b")R.", "not a function"),
    "calls of an array": (BLANK + STATE + b"b)R.", "not a function"),
    "default factory": (
        named(b"collections", b"defaultdict") + named(b"_codecs", b"encode") + b"\x85R.",
        "damaged"
    ),
    "bytearray of a number": (named(b"builtins", b"bytearray") + b"J\x00\x00\x00\x70\x85R.", "damaged"),
    "complex of text": (named(b"builtins", b"complex") + text(b"1") + b"K\x01\x86R.", "damaged"),
    "registry": (b"\x82\x01.", "registry of copyreg"),
    "registry, two bytes": (b"\x83\x01\x00.", "registry of copyreg"),
    "registry, four bytes": (b"\x84\x01\x00\x00\x00.", "registry of copyreg"),
    "persistent id": (b"Pid\n.", "outside of it.*weights_only"),
    "persistent id from the stack": (b"K\x01Q.", "outside of it.*weights_only"),
    "buffer outside": (b"\x97.", "buffers outside"),
    "read-only buffer outside": (b"\x97\x98.", "buffers outside"),
    "an unknown instruction": (b"\xff.", "damaged at byte 0"),
    "below a mark": (b"K\x01(\x85.", "damaged"),
    "nothing on the stack": (b".", "damaged"),
    "escapes in a name": (b"c\x1b[31mos\nsystem\n.", r"\\x1b\[31mos\.system"),
    "a very long name": (b"c" + b"o" * 10_000 + b"\nsystem\n.", "needs o{100},"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    refused(*REFUSED[name])


def chained(length: int, pair: bytes) -> bytes:
    """Values of two references to the one before."""
    links = [b"\x940h" + bytes([n]) + b"h" + bytes([n]) + pair for n in range(length)]
    return b")" + b"".join(links)


MB = b"B" + struct.pack("<I", 1 << 20) + bytes(1 << 20) + b"\x94"
LINE = text(b"latin1")
BOMBS: dict[str, tuple[Callable[[], bytes], str]] = {
    "note at a large number": (lambda: b"Nr\xff\xff\xff\x7f.", ""),
    "bytes that are not there": (lambda: b"\x8e" + struct.pack("<Q", 1 << 40) + b".", "early"),
    "bytearray that is not there": (lambda: b"\x96" + struct.pack("<Q", 1 << 40), "early"),
    "frame that is not there": (lambda: b"\x95" + struct.pack("<Q", 1 << 62) + b"N.", "early"),
    "a number that is not there": (lambda: b"\x8b\xff\xff\xff\x7f.", "early"),
    "digits": (lambda: b"L" + b"9" * 100_000 + b"L\n.", "damaged"),
    "text of many copies": (
        lambda: text(b"a" * 250) + b"\x940(" + 20_000 * (
            named(b"_codecs", b"encode") + b"h\x00" + LINE + b"\x86R") + b"t.", "over and over"
    ),
    "bytearrays of one": (
        lambda: MB + b"0(" + 200 * (named(b"builtins", b"bytearray") + b"h\x00\x85R") + b"t.",
        "over and over",
    ),
    "arrays of one": (
        lambda: MB + b"0(" + 200 * (BLANK + state(
            b"K\x01", b"J" + struct.pack("<i", 1 << 18) + b"\x85", PLAIN, b"\x89", b"h\x00"
        ) + b"b") + b"t.", "over and over",
    ),
    "sets of one": (
        lambda: b"(" + b"".join(b"J" + struct.pack("<i", n) for n in range(5000)) + b"l\x940("
        + 500 * (named(b"builtins", b"set") + b"h\x00\x85R") + b"t.", "over and over",
    ),
    "a key that takes for ever to hash": (
        lambda: b"}" + chained(60, b"\x86") + b"Ns.", "tuple as key"
    ),
    "a key that is nested too deep to hash": (
        lambda: b"}" + b")" + b"\x85" * 50_000 + b"Ns.", "tuple as key"
    ),
    "a set of such": (lambda: b"\x8f(" + chained(60, b"\x86") + b"\x90.", "tuple as key"),
    "a frozenset of such": (lambda: b"(" + chained(60, b"\x86") + b"\x91.", "tuple as key"),
    "numbers that collide": (
        lambda: b"}(" + b"".join(
            b"\x8a\x0a" + (n * ((1 << 61) - 1)).to_bytes(10, "little") + b"N"
            for n in range(1, 50_000)) + b"u.", "int as key",
    ),
    "many tuples, which may collide": (
        lambda: b"}(" + b"".join(
            b"J" + struct.pack("<i", n) + b"\x85N" for n in range(5000)) + b"u.", "tuple as key",
    ),
    "equal long keys": (lambda: b"}X\x00\x00\x01\x00" + bytes(1 << 16) + b"Ns.", "str as key"),
    "nested lists": (lambda: b"]" * 100_000 + b"a" * 99_999 + b".", ""),
    "marks": (lambda: b"(" * 100_000 + b".", "damaged"),
    "fields of a record": (
        lambda: named(b"numpy", b"dtype") + text(b"V1") + b"\x89\x88\x87R("
        + b"K\x03" + text(b"|") + b"N(" + b"N" * 5000 + b"t}K\x01K\x01K\x10tb.", "damaged",
    ),
    "values without bytes": (
        lambda: BLANK + state(
            b"K\x01", b"J\xff\xff\xff\x7f\x85", PLAIN.replace(b"f4", b"U0"), b"\x89", b"C\x00"
        ) + b"b.", "without bytes",
    ),
    "many empty dimensions": (
        lambda: BLANK + state(
            b"K\x01", b"J\xff\xff\xff\x7fJ\xff\xff\xff\x7fK\x00\x87", PLAIN, b"\x89", b"C\x00"
        ) + b"b.", "damaged",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_few_bytes_that_ask_for_much(name: str) -> None:
    make, words = BOMBS[name]
    data = make()
    refused = ""
    tracemalloc.start()
    began = time.process_time()
    try:
        unpickle_arrays(data)
    except FormatError as error:
        refused = str(error)
    finally:
        spent = time.process_time() - began
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert (words in refused) if words else not refused
    assert peak < 200 * len(data) + (1 << 20)
    assert peak < 64 << 20
    assert spent < 5


def test_containers_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("growcache.pickles.machine.MOST_OBJECTS", 1000)
    for some in (b"\x8f", b"]", b"}", b"K\x01\x85", b"(", b"N\x94"):
        refused(some * 1001 + b".", "more than 1,000 containers")


def test_nobody_can_reach_what_is_called() -> None:
    """What stands for functions cannot be changed, and all that is called is in one table."""
    assert len(makers.MAKERS) == 14
    for stands in makers._NAMES.values():
        if isinstance(stands, makers.NamedFunction):
            with pytest.raises((AttributeError, TypeError)):
                stands.anything = 1  # type: ignore[attr-defined]
