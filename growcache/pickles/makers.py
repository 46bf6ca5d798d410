"""Everything that a pickle may ask for by name, and what is made of it here instead."""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from growcache.errors import FormatError
from growcache.pickles import dtypes
from growcache.pickles.keys import Keys

MOST_DIMENSIONS = 32
MOST_ELEMENTS = 1 << 58  # but for its empty dimensions, as NumPy counts
MOST_EMPTY = 1 << 16  # elements of no bytes, which cost a pickle nothing
_SLACK = 4096
_SHOWN = 100  # characters of a name


class Budget:
    """Bytes and items that calls may copy: each byte of a sound pickle is so twice at most.

    What was noted once can be used again by two bytes; so without a bound a pickle could ask
    for a copy of its largest value by every few.
    """

    __slots__ = ("_left",)

    def __init__(self, size: int) -> None:
        self._left = 2 * size + _SLACK

    def spend(self, count: int) -> None:
        """Count what is about to be copied.

        Raises:
            FormatError: more than a sound pickle needs.
        """
        self._left -= count
        if self._left < 0:
            raise FormatError("a pickle uses the same values over and over; refused")


@dataclass(slots=True)
class Unfinished:
    """An array or dtype that its state, which comes next, will make.

    Attributes:
        finish: from the state to what it stands for.
        places: where it is noted.
    """

    finish: Callable[[Any, Budget], object]
    places: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Function:
    """Stands for a function that is never called."""

    name: str


def find(module: str, name: str) -> object:
    """Return what stands for a class or function.

    Raises:
        FormatError: it is none of the few that are known.
    """
    home = "builtins" if module == "__builtin__" else module
    if home.startswith("numpy.core."):  # as NumPy 1 called it
        home = f"numpy._core.{home.removeprefix('numpy.core.')}"
    found = _NAMES.get((home, name))
    if found is None:
        raise FormatError(_refusal(module, name))
    return found


def _refusal(module: str, name: str) -> str:
    shown = f"{module}.{name}".encode("unicode_escape").decode()[:_SHOWN]
    top = module.partition(".")[0]
    advice = "store dicts of arrays instead, made once from what was pickled"
    if top == "torch":
        advice = "store tensor.numpy() instead of a tensor"
    elif top in ("numpy", "pandas"):
        advice = "store plain arrays instead, as by numpy.asarray"
    return (
        f"a pickle needs {shown}, and only arrays and Python's own containers are read from "
        f"pickles, for anything else could run code; {advice}; or, if you trust whoever can "
        "write these objects, call pickle.loads in a function of your own"
    )


def _arguments(arguments: tuple[Any, ...], *kinds: Any) -> tuple[Any, ...]:
    if len(arguments) != len(kinds) or not all(map(isinstance, arguments, kinds)):
        raise TypeError
    return arguments


def _items(arguments: tuple[Any, ...], budget: Budget, keys: Keys) -> list[Any]:
    if not arguments:
        return []
    (items,) = _arguments(arguments, list | tuple)
    budget.spend(len(items))
    for item in items:
        keys.check(item)
    return list(items)


def _set(arguments: tuple[Any, ...], budget: Budget, keys: Keys) -> object:
    return set(_items(arguments, budget, keys))


def _frozenset(arguments: tuple[Any, ...], budget: Budget, keys: Keys) -> object:
    return frozenset(_items(arguments, budget, keys))


def _ordered(arguments: tuple[Any, ...], budget: Budget, keys: Keys) -> object:
    if not arguments:
        return OrderedDict()
    (pairs,) = _arguments(arguments, list)  # Python 2's way
    budget.spend(len(pairs))
    for pair in pairs:
        if type(pair) not in (list, tuple) or len(pair) != 2:
            raise TypeError
        keys.check(pair[0])
    return OrderedDict(pairs)


def _defaultdict(arguments: tuple[Any, ...], budget: Budget, keys: Keys) -> object:
    if not arguments or arguments == (None,):
        return defaultdict(None)
    (factory,) = arguments
    if not any(factory is kind for kind in _FACTORIES):
        raise TypeError
    return defaultdict(factory)


def _complex(arguments: tuple[Any, ...], budget: Budget, keys: Keys) -> object:
    real, imaginary = _arguments(arguments, int | float, int | float)
    return complex(real, imaginary)


def _encode(arguments: tuple[Any, ...], budget: Budget, keys: Keys) -> object:
    text, encoding = _arguments(arguments, str, str)
    if encoding not in ("latin1", "latin-1"):
        raise ValueError
    budget.spend(len(text))
    return text.encode("latin-1")


def _bytes(arguments: tuple[Any, ...], budget: Budget, keys: Keys) -> object:
    return b"" if not arguments else _encode(arguments, budget, keys)


def _bytearray(arguments: tuple[Any, ...], budget: Budget, keys: Keys) -> object:
    if len(arguments) == 1:
        (data,) = _arguments(arguments, bytes)
        budget.spend(len(data))
        return bytearray(data)
    return bytearray(_bytes(arguments, budget, keys))  # type: ignore[call-overload]


def _no_object(arguments: tuple[Any, ...], budget: Budget, keys: Keys) -> object:
    raise FormatError("a pickle makes an object of a class; refused")


def _dtype(arguments: tuple[Any, ...], budget: Budget, keys: Keys) -> Unfinished:
    name = arguments[0]
    if type(name) is not str:
        raise TypeError
    return Unfinished(lambda state, budget: dtypes.finished(name, state, budget.spend))


def _scalar(arguments: tuple[Any, ...], budget: Budget, keys: Keys) -> object:
    dtype, raw = arguments
    values = _array((), dtype, raw, "C")
    budget.spend(values.nbytes)
    return values[()].copy()


def _reconstruct(arguments: tuple[Any, ...], budget: Budget, keys: Keys) -> Unfinished:
    if arguments[0] is not np.ndarray:
        raise TypeError
    return Unfinished(_finished)


def _finished(state: Any, budget: Budget) -> object:
    shape, dtype, fortran, raw = state[-4:]
    if type(raw) is list:
        raise FormatError(dtypes.OBJECTS)
    values = _array(shape, dtype, raw, "F" if fortran else "C")
    budget.spend(values.nbytes)
    return values.copy(order="K")  # its own memory, to be written on


def _frombuffer(arguments: tuple[Any, ...], budget: Budget, keys: Keys) -> object:
    raw, dtype, shape, order, *axes = arguments
    if order == "K" and axes:
        return _array(shape, dtype, raw, "C").transpose(axes[0])
    return _array(shape, dtype, raw, order)


def _array(shape: Any, dtype: Any, raw: Any, order: Any) -> np.ndarray[Any, np.dtype[Any]]:
    """Return an array over the bytes, where all of it fits together."""
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
            "it is damaged"
        )
    if not dtype.itemsize and count > MOST_EMPTY:
        raise FormatError(f"a pickle has an array of {count} values without bytes; refused")
    return np.ndarray(shape, dtype, buffer=raw, order=order)


_FACTORIES = (list, dict, set, int, float, str)
_Call = Callable[[tuple[Any, ...], Budget, Keys], object]
_KNOWN: tuple[tuple[str, str, object, _Call | None], ...] = (
    ("builtins", "set", set, _set),
    ("builtins", "frozenset", frozenset, _frozenset),
    ("builtins", "complex", complex, _complex),
    ("builtins", "bytes", bytes, _bytes),
    ("builtins", "bytearray", bytearray, _bytearray),
    *(("builtins", kind.__name__, kind, None) for kind in _FACTORIES if kind is not set),
    ("collections", "OrderedDict", OrderedDict, _ordered),
    ("collections", "defaultdict", defaultdict, _defaultdict),
    ("_codecs", "encode", Function("_codecs.encode"), _encode),
    # Of old protocols: the class, which is refused by its own name, comes next.
    ("copyreg", "_reconstructor", Function("copyreg._reconstructor"), _no_object),
    ("copy_reg", "_reconstructor", Function("copyreg._reconstructor"), _no_object),
    ("numpy", "ndarray", np.ndarray, None),
    ("numpy", "dtype", np.dtype, _dtype),
    ("numpy._core.multiarray", "_reconstruct", Function("_reconstruct"), _reconstruct),
    ("numpy._core.multiarray", "scalar", Function("scalar"), _scalar),
    ("numpy._core.numeric", "_frombuffer", Function("_frombuffer"), _frombuffer),
)
_NAMES = {(module, name): stands for module, name, stands, _ in _KNOWN}
# By identity, for a pickle may try to call what cannot be hashed.
CALLS: dict[int, _Call] = {id(stands): call for *_, stands, call in _KNOWN if call is not None}
