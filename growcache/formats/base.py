"""The contract of object formats, and the checks of their options.

Formats raise FormatError because of an object, and ConfigError because of an option.
"""

from __future__ import annotations

import difflib
import importlib.util
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar, runtime_checkable

from growcache.config_source import SourceConfig
from growcache.errors import ConfigError, FormatError, MissingLibraryError
from growcache.schema import Sample
from growcache.seeding import generator_at
from growcache.store.contract import Entry
from growcache.usercode import CodeDigest

if TYPE_CHECKING:
    from typing_extensions import Buffer


# Each sample with its origin [start, stop).
SamplesWithOrigins: TypeAlias = list[tuple[Sample, int, int]]

T = TypeVar("T")

MOST_VISIT_BYTES = 1_000_000_000  # bytes; what a sampler may use for a group of shards
MOST_VISIT_SAMPLES = 4_000_000  # of a visit: 300 bytes each, whatever they hold
MOST_UNWRITTEN_BYTES = 1 << 28  # of fill values, of a chunk that was never written
_FREE_DECODED_BYTES = 1 << 25  # bytes of an object that stores next to nothing
DEFLATE_RATIO = 1100  # the ratio of deflate is 1032 at most
RUN_LENGTH_RATIO = 1 << 15  # that of zstd and blosc, where one value is repeated


@dataclass(frozen=True, slots=True)
class Visit:
    """The samples of an object that one visit yields."""

    part: int  # which of the ``parts`` contiguous shares
    parts: int  # into how many the object is divided
    round: int  # the pass of the permutation; with ``seed``, part of every random choice
    seed: int  # of the cache
    take: int | None = None  # the number of random samples of the part; None: all of them
    key: str | None = None  # that random choices go by; None: the object's own
    # of its samples, ascending, where another object says them; None: those of the part
    ordinals: Sequence[int] | None = None

    def chosen_by(self, key: str) -> str:
        return key if self.key is None else self.key

    def given(self, samples: int) -> Sequence[int] | None:
        """Return the ordinals that another object dictates, those below ``samples``."""
        said = self.ordinals
        return None if said is None else said[: bisect_left(said, samples)]


class ObjectReader(Protocol):
    @property
    def entry(self) -> Entry: ...

    @property
    def source(self) -> SourceConfig: ...

    async def read(self, start: int = 0, stop: int | None = None) -> Buffer: ...

    async def find(self, key: str) -> ObjectReader:
        """Return another object of the source, listed or not; see `Store.find`."""


@runtime_checkable
class JoinedReader(ObjectReader, Protocol):
    """Stands for several joined objects."""

    @property
    def partners(self) -> Sequence[ObjectReader]:
        """The objects of the other fields, in their order."""


@dataclass(frozen=True, slots=True)
class Measure:
    """How the size of an object and its number of samples are related."""

    stride_bytes: float  # bytes from one sample to the next
    # such that (size - overhead) / stride is the number of samples; negative where there are
    # gaps between samples
    overhead_bytes: int
    samples: int  # in this object; an estimate where only all of its bytes would tell
    # the number of samples that are worth one visit, unless the user sets it: those that can only
    # be fetched together, or those that make a visit worth its request
    together: int = 1
    empty: str | None = None  # why the object has no sample, where that is known


class PartlyReadError(FormatError):
    """Some samples cannot be read: they are one hole, and ``found`` are the others."""

    def __init__(self, why: str, found: SamplesWithOrigins) -> None:
        super().__init__(why)
        self.found = found


class ObjectFormat:
    """Turns an object's bytes into samples."""

    ranged: bool = False  # parts are read by byte range; else each object whole, as one part
    # Samples come from listed objects; else `endless_entry` stands for all of them, and its parts
    # cannot be counted.
    listed: bool = True
    # The header is read first, because it says where samples are. The two requests, of the header
    # and of a sample, take as long as fetching a small object whole.
    header_first: bool = False
    code_digest: CodeDigest | None = (
        None  # of the user's code that it runs; part of the fingerprint
    )
    # Neighbours in storage are not those in number, or lie in chunks: `ordinals` says which a
    # visit takes, also of the objects that are joined to it.
    says_ordinals: bool = False

    def reads_whole(self, entry: Entry) -> bool:
        """Whether an object is one part, whatever its size; its name alone decides."""
        return not self.ranged

    async def measure(self, reader: ObjectReader) -> Measure:
        """Return the sizes of one object, by default of one sample."""
        return Measure(float(reader.entry.size), 0, 1)

    def follow_fields(self, names: Collection[str]) -> None:
        """Yield the fields of a cache that exists, where names or arrays are the format's choice."""

    async def advice(self, reader: ObjectReader) -> str:
        """Return a sentence if an object's values may not mean what the user takes them for."""
        return ""

    async def ordinals(self, reader: ObjectReader, visit: Visit) -> Sequence[int]:
        """Return the ordinals of a visit's samples in the object, ascending."""
        raise NotImplementedError

    async def read(self, reader: ObjectReader, visit: Visit) -> SamplesWithOrigins:
        """Return the samples of a visit, each with its origin [start, stop).

        Origins count rows, or unpacked bytes where the object has no rows. Arrays are
        little-endian and in C order, and may be read-only views; other values are bytes and str.

        Raises:
            PartlyReadError: some of them cannot be read.
        """
        raise NotImplementedError


async def read_partly(
    object_format: ObjectFormat, reader: ObjectReader, visit: Visit
) -> tuple[SamplesWithOrigins, FormatError | None]:
    try:
        return await object_format.read(reader, visit), None
    except PartlyReadError as error:
        if not error.found:
            raise
        return error.found, error


def refuse_many_samples(key: str, count: int) -> None:
    if count > MOST_VISIT_SAMPLES:
        raise FormatError(
            f"{key}: one visit may yield {MOST_VISIT_SAMPLES:,} samples, found {count:,}",
            code="GC305",
        )


async def read_whole(reader: ObjectReader) -> Buffer:
    if reader.entry.size > MOST_VISIT_BYTES:
        raise FormatError(
            f"{reader.entry.key}: an object that is read whole may have {MOST_VISIT_BYTES:,} bytes, "
            f"found {reader.entry.size:,}; use a format that reads by range, or one of your own",
            code="GC305",
        )
    return await reader.read()


def most_decoded_bytes(entry: Entry, ratio: int = DEFLATE_RATIO) -> int:
    """No compression shrinks by more than ``ratio``.

    A small object gets an allowance, because values never written take no room in an object.
    """
    if entry.is_unwritten:
        return MOST_UNWRITTEN_BYTES
    return min(MOST_VISIT_BYTES, _FREE_DECODED_BYTES + ratio * entry.size)


def ordinals_of_part(samples: int, visit: Visit) -> range:
    return range(visit.part * samples // visit.parts, (visit.part + 1) * samples // visit.parts)


def take_some(found: Sequence[T], visit: Visit, key: str) -> list[T]:
    if visit.take is None or visit.take >= len(found):
        return list(found)
    rng = generator_at("take", visit.seed, visit.round, key, visit.part, visit.parts)
    return [found[i] for i in sorted(rng.choice(len(found), visit.take, replace=False))]


def integer_option(options: Mapping[str, Any], name: str, least: int) -> int | None:
    value = options.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(
            f"source.options.{name}: expected an integer of at least {least}, found {value!r}"
        )
    return value


def choice_option(
    options: Mapping[str, Any], name: str, choices: tuple[str, ...], default: str
) -> str:
    value = options.get(name, default)
    if value not in choices:
        raise ConfigError(
            f"source.options.{name}: expected {' or '.join(choices)}, found {value!r}"
        )
    return str(value)


def bool_option(options: Mapping[str, Any], name: str) -> bool:
    value = options.get(name, False)
    if not isinstance(value, bool):
        raise ConfigError(f"source.options.{name}: expected true or false, found {value!r}")
    return value


def require_library(what: str, module: str, extra: str, name: str | None = None) -> None:
    """Refuse a missing library without importing it."""
    try:
        found = importlib.util.find_spec(module) is not None
    except ValueError:  # a program keeps it from being imported
        found = False
    if not found:
        raise MissingLibraryError(
            f"{what} needs {name or module}; pip install 'growcache[{extra}]'"
        )


def refuse_unknown_options(
    form: str, options: Mapping[str, Any], known: tuple[str, ...]
) -> None:
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
            raise ConfigError(
                f"source.options: format {form} has no option {name!r}; {hint}", code="GC102"
            )


SMALL_OBJECT_BYTES = 1 << 16  # bytes; a request takes about as long as it takes to send these


async def measure_object(object_format: ObjectFormat, reader: ObjectReader) -> Measure:
    """Return the sizes of one object; all samples of a small one are worth one visit."""
    measure = await object_format.measure(reader)
    if not object_format.header_first or _joined_size(reader) > SMALL_OBJECT_BYTES:
        return measure
    return replace(measure, together=max(measure.together, measure.samples))


def _joined_size(reader: ObjectReader) -> int:
    partners = reader.partners if isinstance(reader, JoinedReader) else ()
    return sum(one.entry.size for one in (reader, *partners))


def is_fetched_whole(entry: Entry, visit: Visit) -> bool:
    return entry.size <= SMALL_OBJECT_BYTES and visit.parts == 1 and visit.take != 1


Spec = TypeVar("Spec")


def names_option(option: str, value: object, of: str = "names") -> tuple[str, ...] | None:
    if value is None:
        return None
    if isinstance(value, list | tuple) and value:
        plain = all(type(name) is str and name for name in value)
        if plain and len(set(value)) == len(value):
            return tuple(value)
    raise ConfigError(
        f"source.options.{option}: expected a list of different {of}, found {value!r}"
    )


def named_specs_option(
    option: str, value: object, such_as: str, make_spec: Callable[[str, Any], Spec]
) -> tuple[Spec, ...] | None:
    """``make_spec(name, what)`` gets None for a name without a spec."""
    if value is None:
        return None
    if isinstance(value, list | tuple):
        return tuple(make_spec(name, None) for name in names_option(option, value) or ())
    if not isinstance(value, Mapping) or not value:
        raise ConfigError(
            f"source.options.{option}: expected a list of names, or a mapping such as {such_as}, "
            f"found {value!r}"
        )
    for name in value:
        if not isinstance(name, str) or not name:
            raise ConfigError(f"source.options.{option}: expected names, found {name!r}")
    return tuple(make_spec(name, what) for name, what in value.items())


ENDLESS_PARTS = 1 << 40  # parts of a source that is no list of objects: never all drawn


def endless_entry(name: str) -> Entry:
    return Entry(name, ENDLESS_PARTS, None, None)
