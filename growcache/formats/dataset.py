"""``source.dataset``: a map-style Dataset, whose indices are objects.

A sampler makes the Dataset once and calls it in threads. The calls overlap as far as the
Dataset releases the interpreter's lock.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from growcache.config_source import SourceConfig
from growcache.errors import ConfigError, FormatError, TransientStoreError
from growcache.formats.base import ObjectFormat, ObjectReader, Visit
from growcache.formats.items import UserCall, UserThreads
from growcache.schema import DTYPE_KINDS, Sample
from growcache.usercode import RUNNING_CALLS, CodeDigest, Maker, UserCode, load_maker

# A call is given up before the supervisor counts the sampler as stalled, because the other
# calls would be lost then.
PATIENCE = 0.75  # of sampling.timeout_seconds
_PASSING_ERRORS = (ConnectionError, TimeoutError)  # a retry may succeed


class DatasetFormat(ObjectFormat):
    """The format of a Dataset.

    An object's key is an index, and its one sample is the value there.
    """

    def __init__(
        self,
        maker: Maker,
        dataset: Any,
        names: Sequence[str] | None,
        timeout_seconds: float,
    ) -> None:
        self.length = require_length(dataset, maker.name)
        self.answered_at = time.monotonic()  # when a call last returned or raised
        self.code_digest = maker.digest
        self._patience_seconds = PATIENCE * timeout_seconds
        self._threads = UserThreads()

        def at(index: int) -> Mapping[str, Any]:
            return as_fields(dataset[index], names)

        digest = maker.digest or CodeDigest("", "")
        root = maker.source_root
        self._code = UserCode(maker.name, "source.dataset", digest, root, at, ("index",))

    async def read(self, reader: ObjectReader, visit: Visit) -> list[tuple[Sample, int, int]]:
        return [(await self._called(int(reader.entry.key)), 0, 1)]

    async def answers(self, index: int) -> bool:
        try:
            await self._called(index)
        except TransientStoreError:
            return False
        except FormatError:
            pass
        return True

    async def _called(self, index: int) -> Sample:
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._patience_seconds):
                sample = await self._threads.run(lambda call: self._sample(index, call))
        except TimeoutError:
            RUNNING_CALLS.give_up(self._patience_seconds)
            raise _passing(
                f"{self._code.name} did not return index {index} in "
                f"{self._patience_seconds:g} s",
                began,
            ) from None
        except FormatError as error:
            if isinstance(error.__cause__, _PASSING_ERRORS):
                raise _passing(str(error), began) from error
            self.answered_at = time.monotonic()
            raise
        self.answered_at = time.monotonic()
        return sample

    def _sample(self, index: int, call: UserCall) -> Sample:
        call.check()  # it may have waited for a thread until it was given up
        key = f"index {index}"
        sample = self._code.sample(key, self._code(key, {"index": index}))
        for name, value in sample.items():
            if (found := unstorable(value)) is not None:
                raise FormatError(
                    f"{self._code.name} on {key}: {name!r} is {found}, which cannot be cached; "
                    "convert it to numbers, or keep other fields of a dict with names",
                    code="GC309",
                )
        return sample


def _passing(why: str, since: float) -> TransientStoreError:
    error = TransientStoreError(why)
    error.since = since
    return error


def require_length(dataset: Any, name: str) -> int:
    """Return the length of a map-style Dataset.

    Raises:
        ConfigError: The object is not a map-style Dataset.
    """
    wanted = "expected a map-style Dataset, which has a length and gives dataset[i]"
    if isinstance(dataset, Mapping | str | bytes) or not hasattr(dataset, "__getitem__"):
        raise ConfigError(
            f"source.dataset: {wanted}; {name} is or makes a {type(dataset).__qualname__}",
            code="GC114",
        )
    try:
        length = len(dataset)
    except Exception as error:  # the user's code may raise anything
        raise ConfigError(
            f"source.dataset: {wanted}; len of {name}, a "
            f"{type(dataset).__qualname__}, raises {type(error).__name__}: {error}",
            code="GC114",
        ) from error
    if not length:
        raise ConfigError(
            f"source.dataset: the length of {name} is 0; there is nothing to draw", code="GC114"
        )
    return length


def as_fields(value: Any, names: Sequence[str] | None) -> dict[str, Any]:
    """Return a Dataset's value as named fields.

    >>> as_fields((1, 2), None), as_fields((1, 2), ["x", "y"]), as_fields(5, None)
    ({'0': 1, '1': 2}, {'x': 1, 'y': 2}, {'x': 5})
    >>> as_fields({"image": 1, "crs": 2}, ["image"])
    {'image': 1}
    >>> as_fields((1, {"boxes": 2, "labels": 3}), ["image", "target"])
    {'image': 1, 'target.boxes': 2, 'target.labels': 3}
    """
    return _flat(_named(value, names))


def _named(value: Any, names: Sequence[str] | None) -> Mapping[Any, Any]:
    if isinstance(value, Mapping):
        return {name: value[name] for name in _chosen(value, names)}
    if not isinstance(value, tuple | list):
        value, own = (value,), ("x",)
    else:
        own = getattr(value, "_fields", None) or tuple(map(str, range(len(value))))
    if names is not None and len(names) != len(value):
        raise ValueError(f"names has {len(names)} names, but the value has {len(value)} fields")
    return dict(zip(names or own, value, strict=True))


def _flat(value: Mapping[Any, Any], prefix: str = "") -> dict[Any, Any]:
    """Return the values of nested dicts with dotted names, as for Parquet's structs."""
    flat: dict[Any, Any] = {}
    for name, one in value.items():
        path = f"{prefix}{name}" if prefix else name
        more = _flat(one, f"{path}.") if isinstance(one, Mapping) else {path: as_array(one)}
        if both := flat.keys() & more.keys():
            raise ValueError(f"two values have the name {min(both)!r}")
        flat |= more
    return flat


def _chosen(value: Mapping[Any, Any], names: Sequence[str] | None) -> Sequence[Any]:
    missing = [name for name in names or () if name not in value]
    if missing:
        raise ValueError(f"there is no {missing[0]!r}; there are {', '.join(map(str, value))}")
    return tuple(value) if names is None else names


def as_array(value: Any) -> Any:
    """Return a tensor as an array, and anything else unchanged, because NumPy converts that."""
    torch = sys.modules.get("torch")  # any code that made a tensor has imported it
    if torch is None or not isinstance(value, torch.Tensor):
        return value
    wide = _WIDENED.get(str(value.dtype))  # NumPy lacks this type
    return (value if wide is None else value.to(getattr(torch, wide))).numpy(force=True)


# As in the format npy.
_WIDENED = {
    "torch.bfloat16": "float32",
    "torch.float8_e4m3fn": "float16",
    "torch.float8_e5m2": "float16",
}


def unstorable(value: Any) -> str | None:
    """Return a description of an array that no cache can hold, or None for other arrays.

    >>> unstorable(np.asarray(None)), unstorable(np.asarray(["a", "b"])), unstorable(np.asarray("a"))
    ('None', 'an array of str', None)
    """
    if not isinstance(value, np.ndarray) or value.dtype.kind in DTYPE_KINDS:
        return None
    if value.ndim == 0:
        held = value.item()
        if value.dtype.kind in "SU":
            return None
        return "None" if held is None else f"a {type(held).__name__}"
    return f"an array of {value.dtype.type.__name__.removesuffix('_')}"


def open_dataset(source: SourceConfig, timeout_seconds: float = 60.0) -> DatasetFormat:
    """Make the Dataset and return its format."""
    assert source.dataset is not None
    maker = load_maker(source.dataset, source.options, ("source.dataset", "source.options"))
    return DatasetFormat(maker, maker.make(), source.names, timeout_seconds)
