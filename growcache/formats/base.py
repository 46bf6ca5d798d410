"""The contract of object formats, and checks of their options.

Formats raise FormatError for a wrong object, and ConfigError for a wrong option.
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

MOST_VISIT_BYTES = 1_000_000_000  # as much as a sampler may use for a group of shards
MOST_VISIT_SAMPLES = 4_000_000  # of a visit; each takes 300 bytes, whatever its content
MOST_UNWRITTEN_BYTES = 1 << 28  # of fill values in a chunk that was never written
_FREE_DECODED_BYTES = 1 << 25  # decoded bytes that any object may have, however small it is
DEFLATE_RATIO = 1100  # above the 1032 that deflate reaches
RUN_LENGTH_RATIO = 1 << 15  # of zstd and blosc for one repeated value


@dataclass(frozen=True, slots=True)
class Visit:
    """The samples of an object that one visit yields.

    Attributes:
        part: Number of the visited part, from 0.
        parts: Number of contiguous parts of the object.
        round: Pass of the permutation. Together with ``seed``, it is part of every random
            choice.
        seed: Seed of the cache.
        take: Number of random samples to take from the part; None takes all.
        key: Key for random choices; None means the object's own.
        ordinals: Numbers of the samples in the object, ascending, if another object determines
            them; None takes those of the part.
    """

    part: int
    parts: int
    round: int
    seed: int
    take: int | None = None
    key: str | None = None
    ordinals: Sequence[int] | None = None

    def chosen_by(self, key: str) -> str:
        return key if self.key is None else self.key

    def given(self, samples: int) -> Sequence[int] | None:
        """Return the ordinals below ``samples`` that another object determined, or None."""
        said = self.ordinals
        return None if said is None else said[: bisect_left(said, samples)]


class ObjectReader(Protocol):
    """One object, as a format reads it.

    Attributes:
        entry: Its key, size and version.
        source: The configuration of its source.
    """

    @property
    def entry(self) -> Entry: ...

    @property
    def source(self) -> SourceConfig: ...

    async def read(self, start: int = 0, stop: int | None = None) -> Buffer:
        """Return the bytes [start, stop) of the object, by default all; see `Store.read`."""

    async def find(self, key: str) -> ObjectReader:
        """Return another object of the source, whether it is listed or not; see `Store.find`."""


@runtime_checkable
class JoinedReader(ObjectReader, Protocol):
    """The reader of several joined objects, which make samples together."""

    @property
    def partners(self) -> Sequence[ObjectReader]:
        """The objects of the other fields, in order."""


@dataclass(frozen=True, slots=True)
class Measure:
    """The relation between the size of an object and its number of samples.

    Attributes:
        stride_bytes: Bytes from one sample to the next.
        overhead_bytes: Bytes such that (size - overhead_bytes) / stride_bytes is the number of
            samples. It is negative if there are gaps between samples.
        samples: Number of samples in this object; an estimate if only reading all bytes would
            tell.
        together: Number of samples that are worth one visit, unless the user sets it. These can
            only be fetched together, or make a visit worth its request.
        empty: Why the object has no sample, if known.
    """

    stride_bytes: float
    overhead_bytes: int
    samples: int
    together: int = 1
    empty: str | None = None


class PartlyReadError(FormatError):
    """Some samples of a visit cannot be read.

    They form one hole, and ``found`` has the others.
    """

    def __init__(self, why: str, found: SamplesWithOrigins) -> None:
        super().__init__(why)
        self.found = found


class ObjectFormat:
    """Base class of formats. A format turns the bytes of an object into samples.

    The methods are called in one event loop, for several objects concurrently.

    Attributes:
        ranged: Whether parts are read by byte range. Otherwise each object is read whole, as
            one part.
        listed: Whether samples come from listed objects. Otherwise `endless_entry` represents
            all of them, and its parts cannot be counted.
        header_first: Whether the header is read first, because it has the places of samples.
            The two requests, for the header and a sample, take as long as fetching a small
            object whole.
        code_digest: Digest of the user code that the format runs, which is part of the
            fingerprint; None without user code.
        says_ordinals: Whether `ordinals` determines the samples of a visit, also for joined
            objects. It does if the order in storage differs from that of the numbers, or if
            samples share chunks.
    """

    ranged: bool = False
    listed: bool = True
    header_first: bool = False
    code_digest: CodeDigest | None = None
    says_ordinals: bool = False

    def reads_whole(self, entry: Entry) -> bool:
        """Whether the object is one part, whatever its size. Only its name decides."""
        return not self.ranged

    async def measure(self, reader: ObjectReader) -> Measure:
        """Return the relation of size and samples for one object. By default it is one sample.

        Raises:
            FormatError: The object is not of this format.
            StoreError: The object cannot be read.
        """
        return Measure(float(reader.entry.size), 0, 1)

    def follow_fields(self, names: Collection[str]) -> None:
        """Keep to the fields ``names`` of an existing cache, where the format chooses fields itself."""

    async def advice(self, reader: ObjectReader) -> str:
        """Return advice if an object's values may not mean what the user expects, or else ""."""
        return ""

    async def ordinals(self, reader: ObjectReader, visit: Visit) -> Sequence[int]:
        """Return the numbers of a visit's samples in the object, ascending.

        Formats with ``says_ordinals`` implement it.
        """
        raise NotImplementedError

    async def read(self, reader: ObjectReader, visit: Visit) -> SamplesWithOrigins:
        """Return the samples of a visit as (sample, start, stop).

        [start, stop) is the origin in the object: rows, or unpacked bytes if the object has no
        rows. Arrays are little-endian and in C order, and may be read-only views. Other values
        are bytes and str.

        Args:
            reader: The object.
            visit: The part to read, and the number of samples to take from it.

        Raises:
            PartlyReadError: Some of the samples cannot be read.
            FormatError: The object is not of this format, or is damaged.
            StoreError: The object cannot be read.
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
            f"{key}: one visit may yield at most {MOST_VISIT_SAMPLES:,} samples, found "
            f"{count:,}",
            code="GC305",
        )


async def read_whole(reader: ObjectReader) -> Buffer:
    if reader.entry.size > MOST_VISIT_BYTES:
        raise FormatError(
            f"{reader.entry.key}: an object that is read whole may have at most "
            f"{MOST_VISIT_BYTES:,} bytes, found {reader.entry.size:,}; use a format that reads "
            "by range, or one of your own",
            code="GC305",
        )
    return await reader.read()


def most_decoded_bytes(entry: Entry, ratio: int = DEFLATE_RATIO) -> int:
    """Return the most bytes that an object may decode to, if no compression exceeds ``ratio``.

    Small objects get an allowance, because values that were never written take no room in an
    object.
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
    """Raise MissingLibraryError if a library is missing, without importing it."""
    try:
        found = importlib.util.find_spec(module) is not None
    except ValueError:  # the program prevents its import
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


SMALL_OBJECT_BYTES = 1 << 16  # a request takes about as long as the transfer of these


async def measure_object(object_format: ObjectFormat, reader: ObjectReader) -> Measure:
    """Return the measure of one object. All samples of a small object are worth one visit."""
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
    """Return the specs in an option that is a list of names, or a mapping of names to specs.

    ``make_spec(name, what)`` gets None for a name without a spec.
    """
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


ENDLESS_PARTS = 1 << 40  # parts of a source without listed objects: more than can be drawn


def endless_entry(name: str) -> Entry:
    return Entry(name, ENDLESS_PARTS, None, None)
