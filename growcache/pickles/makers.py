"""Everything that a pickle may name, the values made for it, and the keys that it may hash.

Keys are checked, because Python hashes text with a secret, but numbers and tuples by public
rules. A pickle could contain a million keys that collide, or nested tuples that take forever to
hash.
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from growcache.errors import FormatError
from growcache.pickles import dtypes

MOST_TEXT = 4096  # characters of a key, because equal long keys are compared again and again
SHORT_TEXT = 256  # characters; such text needs no further check
MOST_TUPLES = 4096  # as keys, whose collisions cannot be predicted
MOST_ITEMS = 64  # of a tuple as a key
_MOST_INTEGER = 1 << 63  # larger numbers could share their hashes with others
_HARMLESS_KINDS = (bool, float, type(None))


class KeyChecker:
    __slots__ = ("_tuples",)

    def __init__(self) -> None:
        self._tuples = 0

    def check(self, key: object) -> None:
        kind = type(key)
        if (kind is str or kind is bytes) and len(key) <= MOST_TEXT:  # type: ignore[arg-type]
            return
        if not _is_plain(key) and not (kind is tuple and self._is_short(key)):
            raise FormatError(
                f"a pickle has a {kind.__name__} as key of a dict or in a set, or a very long "
                "one; expected text, numbers, or short tuples of them",
                code="GC304",
            )

    def _is_short(self, key: object) -> bool:
        self._tuples += 1
        return self._tuples <= MOST_TUPLES and _is_plain_tuple(key, 2)


def _is_plain_tuple(key: object, depth: int) -> bool:
    return (
        type(key) is tuple
        and len(key) <= MOST_ITEMS
        and all(
            _is_plain(item) or (depth > 1 and _is_plain_tuple(item, depth - 1)) for item in key
        )
    )


def _is_plain(key: object) -> bool:
    kind = type(key)
    if kind is int:
        return -_MOST_INTEGER <= key < _MOST_INTEGER  # type: ignore[operator]
    if kind in _HARMLESS_KINDS:
        return True
    if isinstance(key, str | bytes):  # includes NumPy's, which are subclasses
        return len(key) <= MOST_TEXT
    return isinstance(key, np.bool_ | np.integer | np.float16 | np.float32 | np.float64)


MOST_DIMENSIONS = 32
MOST_ELEMENTS = 1 << 58  # as NumPy counts, which ignores empty dimensions
MOST_EMPTY = 1 << 16  # elements without bytes, which cost a pickle nothing
_SLACK = 4096
_SHOWN = 100  # characters of a name


class CopyBudget:
    """The bytes and items that calls may copy: at most twice the size of a valid pickle.

    Two bytes can use a memoized value again, so a pickle could request endless copies of it.
    """

    __slots__ = ("_left",)

    def __init__(self, size: int) -> None:
        self._left = 2 * size + _SLACK

    def spend(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise FormatError(
                "a pickle uses the same values over and over; refused", code="GC304"
            )


@dataclass(slots=True)
class Unfinished:
    """An array or dtype before the pickle gives its state."""

    finish: Callable[[Any, CopyBudget], object]  # makes the value from the state
    places: list[int] = field(default_factory=list)  # its memo numbers


@dataclass(frozen=True, slots=True)
class NamedFunction:
    """Stands for a function that is never called."""

    name: str


def stand_in_for(module: str, name: str) -> object:
    home = "builtins" if module == "__builtin__" else module
    if home.startswith("numpy.core."):  # as NumPy 1 called it
        home = f"numpy._core.{home.removeprefix('numpy.core.')}"
    found = _NAMES.get((home, name))
    if found is None:
        raise FormatError(_refusal_message(module, name), code="GC304")
    return found


def _refusal_message(module: str, name: str) -> str:
    shown = f"{module}.{name}".encode("unicode_escape").decode()[:_SHOWN]
    top = module.partition(".")[0]
    advice = "store dicts of arrays instead, made once from what was pickled"
    if top == "torch":
        advice = "store tensor.numpy() instead of a tensor"
    elif top in ("numpy", "pandas"):
        advice = "store plain arrays instead, as by numpy.asarray"
    return (
        f"a pickle needs {shown}, and only arrays and Python's own containers are read from "
        f"pickles, because anything else could run code; {advice}; or, if you trust whoever can "
        "write these objects, call pickle.loads in a function of your own"
    )


def _arguments(arguments: tuple[Any, ...], *kinds: Any) -> tuple[Any, ...]:
    if len(arguments) != len(kinds) or not all(map(isinstance, arguments, kinds)):
        raise TypeError
    return arguments


def _items(arguments: tuple[Any, ...], budget: CopyBudget, keys: KeyChecker) -> list[Any]:
    if not arguments:
        return []
    (items,) = _arguments(arguments, list | tuple)
    budget.spend(len(items))
    for item in items:
        keys.check(item)
    return list(items)


def _set(arguments: tuple[Any, ...], budget: CopyBudget, keys: KeyChecker) -> object:
    return set(_items(arguments, budget, keys))


def _frozenset(arguments: tuple[Any, ...], budget: CopyBudget, keys: KeyChecker) -> object:
    return frozenset(_items(arguments, budget, keys))


def _ordered(arguments: tuple[Any, ...], budget: CopyBudget, keys: KeyChecker) -> object:
    if not arguments:
        return OrderedDict()
    (pairs,) = _arguments(arguments, list)  # Python 2's way
    budget.spend(len(pairs))
    for pair in pairs:
        if type(pair) not in (list, tuple) or len(pair) != 2:
            raise TypeError
        keys.check(pair[0])
    return OrderedDict(pairs)


def _defaultdict(arguments: tuple[Any, ...], budget: CopyBudget, keys: KeyChecker) -> object:
    if not arguments or arguments == (None,):
        return defaultdict(None)
    (factory,) = arguments
    if not any(factory is kind for kind in _FACTORIES):
        raise TypeError
    return defaultdict(factory)


def _complex(arguments: tuple[Any, ...], budget: CopyBudget, keys: KeyChecker) -> object:
    real, imaginary = _arguments(arguments, int | float, int | float)
    return complex(real, imaginary)


def _encode(arguments: tuple[Any, ...], budget: CopyBudget, keys: KeyChecker) -> object:
    text, encoding = _arguments(arguments, str, str)
    if encoding not in ("latin1", "latin-1"):
        raise ValueError
    budget.spend(len(text))
    return text.encode("latin-1")


def _bytes(arguments: tuple[Any, ...], budget: CopyBudget, keys: KeyChecker) -> object:
    return b"" if not arguments else _encode(arguments, budget, keys)


def _bytearray(arguments: tuple[Any, ...], budget: CopyBudget, keys: KeyChecker) -> object:
    if len(arguments) == 1:
        (data,) = _arguments(arguments, bytes)
        budget.spend(len(data))
        return bytearray(data)
    return bytearray(_bytes(arguments, budget, keys))  # type: ignore[call-overload]


def _refuse_object(arguments: tuple[Any, ...], budget: CopyBudget, keys: KeyChecker) -> object:
    raise FormatError("a pickle makes an object of a class; refused", code="GC304")


def _dtype(arguments: tuple[Any, ...], budget: CopyBudget, keys: KeyChecker) -> Unfinished:
    name = arguments[0]
    if type(name) is not str:
        raise TypeError
    return Unfinished(lambda state, budget: dtypes.dtype_from_state(name, state, budget.spend))


def _scalar(arguments: tuple[Any, ...], budget: CopyBudget, keys: KeyChecker) -> object:
    dtype, raw = arguments
    values = _array((), dtype, raw, "C")
    budget.spend(values.nbytes)
    return values[()].copy()


def _reconstruct(
    arguments: tuple[Any, ...], budget: CopyBudget, keys: KeyChecker
) -> Unfinished:
    if arguments[0] is not np.ndarray:
        raise TypeError
    return Unfinished(_finish_array)


def _finish_array(state: Any, budget: CopyBudget) -> object:
    shape, dtype, fortran, raw = state[-4:]
    if type(raw) is list:
        raise FormatError(dtypes.OBJECT_ARRAY_MESSAGE, code="GC304")
    values = _array(shape, dtype, raw, "F" if fortran else "C")
    budget.spend(values.nbytes)
    return values.copy(order="K")  # a writable copy


def _frombuffer(arguments: tuple[Any, ...], budget: CopyBudget, keys: KeyChecker) -> object:
    raw, dtype, shape, order, *axes = arguments
    if order == "K" and axes:
        return _array(shape, dtype, raw, "C").transpose(axes[0])
    return _array(shape, dtype, raw, order)


def _array(shape: Any, dtype: Any, raw: Any, order: Any) -> np.ndarray[Any, np.dtype[Any]]:
    if type(raw) is str:  # Python 2's bytes
        raw = raw.encode("latin-1")
    if not isinstance(dtype, np.dtype) or type(raw) not in (bytes, bytearray):
        raise TypeError
    if type(shape) is not tuple or len(shape) > MOST_DIMENSIONS or order not in ("C", "F"):
        raise TypeError
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError
    count = math.prod(shape)
    if (
        count * dtype.itemsize != len(raw)
        or math.prod(max(1, n) for n in shape) >= MOST_ELEMENTS
    ):
        raise FormatError(
            f"a pickle has an array of {str(shape)[:60]} with {len(raw)} bytes of {dtype}; "
            "it is damaged",
            code="GC302",
        )
    if not dtype.itemsize and count > MOST_EMPTY:
        raise FormatError(
            f"a pickle has an array of {count} values without bytes; refused", code="GC304"
        )
    return np.ndarray(shape, dtype, buffer=raw, order=order)


_FACTORIES = (list, dict, set, int, float, str)
_Maker = Callable[[tuple[Any, ...], CopyBudget, KeyChecker], object]
_KNOWN: tuple[tuple[str, str, object, _Maker | None], ...] = (
    ("builtins", "set", set, _set),
    ("builtins", "frozenset", frozenset, _frozenset),
    ("builtins", "complex", complex, _complex),
    ("builtins", "bytes", bytes, _bytes),
    ("builtins", "bytearray", bytearray, _bytearray),
    *(("builtins", kind.__name__, kind, None) for kind in _FACTORIES if kind is not set),
    ("collections", "OrderedDict", OrderedDict, _ordered),
    ("collections", "defaultdict", defaultdict, _defaultdict),
    ("_codecs", "encode", NamedFunction("_codecs.encode"), _encode),
    # In old protocols the class comes next, and is refused by its own name.
    ("copyreg", "_reconstructor", NamedFunction("copyreg._reconstructor"), _refuse_object),
    ("copy_reg", "_reconstructor", NamedFunction("copyreg._reconstructor"), _refuse_object),
    ("numpy", "ndarray", np.ndarray, None),
    ("numpy", "dtype", np.dtype, _dtype),
    ("numpy._core.multiarray", "_reconstruct", NamedFunction("_reconstruct"), _reconstruct),
    ("numpy._core.multiarray", "scalar", NamedFunction("scalar"), _scalar),
    ("numpy._core.numeric", "_frombuffer", NamedFunction("_frombuffer"), _frombuffer),
)
_NAMES = {(module, name): stands for module, name, stands, _ in _KNOWN}
# By identity, because a pickle may try to call an unhashable object.
MAKERS: dict[int, _Maker] = {
    id(stands): call for *_, stands, call in _KNOWN if call is not None
}
