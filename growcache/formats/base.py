"""The contract of object formats, and the checks of their options."""

from __future__ import annotations

import difflib
import importlib.util
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from growcache.config import SourceConfig
from growcache.errors import ConfigError, FormatError, MissingLibraryError
from growcache.schema import Sample
from growcache.store.contract import Entry

if TYPE_CHECKING:
    from typing_extensions import Buffer


SamplesWithOrigins: TypeAlias = list[
    tuple[Sample, int, int]
]  # each sample with its origin [start, stop)

MOST_VISIT_BYTES = 1_000_000_000  # bytes; what a sampler may use for a group of shards
_FREE_DECODED_BYTES = 1 << 25  # bytes of an object that stores next to nothing
DEFLATE_RATIO = 1100  # the ratio of deflate is 1032 at most
RUN_LENGTH_RATIO = 1 << 15  # that of zstd and blosc, for one value again and again


@dataclass(frozen=True, slots=True)
class Visit:
    """Which samples of an object one visit yields.

    Attributes:
        part: which of the ``parts`` contiguous shares.
        parts: into how many the object is divided.
        round: the pass of the permutation; with ``seed``, part of every random choice.
        seed: of the cache.
        take: so many samples of the part, at random, instead of all of them.
        key: that random choices go by; None: the object's own.
        ordinals: of its samples, ascending, where another object says them; None: those of the
            part.
    """

    part: int
    parts: int
    round: int
    seed: int
    take: int | None = None
    key: str | None = None
    ordinals: Sequence[int] | None = None

    def chosen_by(self, key: str) -> str:
        """Return the key that random choices in an object go by."""
        return key if self.key is None else self.key

    def given(self, samples: int) -> Sequence[int] | None:
        """Return the ordinals that another object says, as far as an object has so many samples."""
        said = self.ordinals
        return None if said is None else said[: bisect_left(said, samples)]


class ObjectReader(Protocol):
    """An object, as a format reads it."""

    @property
    def entry(self) -> Entry:
        """Which object."""

    @property
    def source(self) -> SourceConfig:
        """What it is an object of."""

    async def read(self, start: int = 0, stop: int | None = None) -> Buffer:
        """Return the bytes [start, stop)."""

    async def find(self, key: str) -> ObjectReader:
        """Return another object of the source, listed or not; see `Store.find`."""


@runtime_checkable
class JoinedReader(ObjectReader, Protocol):
    """An object of several that are one, as formats read it."""

    @property
    def partners(self) -> Sequence[ObjectReader]:
        """The objects of the other fields, in their order."""


@dataclass(frozen=True, slots=True)
class Measure:
    """How an object's size and its number of samples hang together.

    Attributes:
        stride_bytes: by how many bytes one sample lies behind the one before.
        overhead_bytes: such that (size - overhead) / stride is the number of samples; negative
            where samples lie apart.
        samples: in this object; about, where only all of its bytes would tell.
        together: so many samples are worth one visit, where the user does not say: what can only
            be fetched together, or what makes a visit worth its request.
    """

    stride_bytes: float
    overhead_bytes: int
    samples: int
    together: int = 1


class PartlyReadError(FormatError):
    """Some samples of a visit cannot be read: they are one hole, and the others are kept.

    Args:
        why: says which, and what is wrong with them.
        found: the others, with their origins.
    """

    def __init__(self, why: str, found: SamplesWithOrigins) -> None:
        super().__init__(why)
        self.found = found


class ObjectFormat(Protocol):
    """Turns an object's bytes into samples."""

    @property
    def ranged(self) -> bool:
        """Whether parts are read by byte range; otherwise each object whole, as one part."""

    @property
    def listed(self) -> bool:
        """Whether samples come from listed objects.

        Otherwise `endless_entry` stands for all of them, and its parts cannot be counted.
        """

    @property
    def code_digest(self) -> str | None:
        """Of the user's code that it runs, a part of the cache's fingerprint."""

    async def measure(self, reader: ObjectReader) -> Measure:
        """Return the sizes of one object.

        Raises:
            FormatError: the object is not what the format says.
        """

    async def read(self, reader: ObjectReader, visit: Visit) -> SamplesWithOrigins:
        """Return the samples of a visit, each with its origin [start, stop).

        Origins count rows; bytes where the object has none. Arrays are little-endian, in C
        order, and may be read-only views of one buffer; beside them there are bytes and str.

        Raises:
            PartlyReadError: some of them cannot be read.
            FormatError: the object is not what the format says.
        """


@runtime_checkable
class ChunkedFormat(Protocol):
    """A format whose samples lie in chunks, which parts begin and end with."""

    async def ordinals(self, reader: ObjectReader, visit: Visit) -> Sequence[int]:
        """Return which samples of the object a visit yields, counted from the first, ascending.

        Raises:
            FormatError: the object is not what the format says.
        """


async def read_partly(
    form: ObjectFormat, reader: ObjectReader, visit: Visit
) -> tuple[SamplesWithOrigins, FormatError | None]:
    """Return the samples of a visit that can be read, and what is wrong with the others.

    Raises:
        FormatError: no sample can be read.
    """
    try:
        return await form.read(reader, visit), None
    except PartlyReadError as error:
        if not error.found:
            raise
        return error.found, error


async def read_whole(reader: ObjectReader) -> Buffer:
    """Return all bytes of an object that a sampler can hold.

    Raises:
        FormatError: it is larger.
    """
    if reader.entry.size > MOST_VISIT_BYTES:
        raise FormatError(
            f"{reader.entry.key}: an object that is read whole may have {MOST_VISIT_BYTES:,} bytes, "
            f"found {reader.entry.size:,}; use a format that reads by range, or one of your own"
        )
    return await reader.read()


def most_decoded_bytes(entry: Entry, ratio: int = DEFLATE_RATIO) -> int:
    """Return the bytes that a visit may make of an object that stores them compressed.

    No compression shrinks further than its ``ratio``. What was never written takes no room at
    all, and gets some.
    """
    return min(MOST_VISIT_BYTES, _FREE_DECODED_BYTES + ratio * entry.size)


def ordinals_of_part(samples: int, visit: Visit) -> range:
    """Return the ordinals of the samples in the visit's part: contiguous, possibly none."""
    return range(visit.part * samples // visit.parts, (visit.part + 1) * samples // visit.parts)


def integer_option(options: Mapping[str, Any], name: str, least: int) -> int | None:
    """Return an integer option, None where it is not given.

    Raises:
        ConfigError: not an integer of at least ``least``.
    """
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
    """Return an option that is one of few words.

    Raises:
        ConfigError: another word.
    """
    value = options.get(name, default)
    if value not in choices:
        raise ConfigError(
            f"source.options.{name}: expected {' or '.join(choices)}, found {value!r}"
        )
    return str(value)


def bool_option(options: Mapping[str, Any], name: str) -> bool:
    """Return an option that is false where it is not given.

    Raises:
        ConfigError: it is neither.
    """
    value = options.get(name, False)
    if not isinstance(value, bool):
        raise ConfigError(f"source.options.{name}: expected true or false, found {value!r}")
    return value


def require_library(form: str, module: str) -> None:
    """Refuse a format whose library is not installed; it is imported by who uses it.

    Raises:
        MissingLibraryError: says how to install it.
    """
    try:
        found = importlib.util.find_spec(module) is not None
    except ValueError:  # a program keeps it from being imported
        found = False
    if not found:
        raise MissingLibraryError(
            f"source.format: {form} needs {module}; pip install 'growcache[{form}]'"
        )


def refuse_unknown_options(
    form: str, options: Mapping[str, Any], known: tuple[str, ...]
) -> None:
    """Refuse options that the format does not have.

    Raises:
        ConfigError: names the nearest one it has.
    """
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
            raise ConfigError(f"source.options: format {form} has no option {name!r}; {hint}")


SMALL_OBJECT_BYTES = 1 << 16  # bytes; a request takes about as long as it takes to send these


@runtime_checkable
class HeaderFirstFormat(Protocol):
    """A format that reads a header before it knows where samples lie.

    To ask for the header alone and then for a sample takes two requests, and as long as it takes
    to fetch a small object.
    """

    @property
    def headed(self) -> bool:
        """Yes; of joined objects, whether any of them is read so."""


async def measure_object(form: ObjectFormat, reader: ObjectReader) -> Measure:
    """Return the sizes of one object; of a small one all samples are worth one visit.

    Raises:
        FormatError: the object is not what the format says.
    """
    measure = await form.measure(reader)
    if not (
        isinstance(form, HeaderFirstFormat)
        and form.headed
        and _joined_size(reader) <= SMALL_OBJECT_BYTES
    ):
        return measure
    return replace(measure, together=max(measure.together, measure.samples))


def _joined_size(reader: ObjectReader) -> int:
    partners = reader.partners if isinstance(reader, JoinedReader) else ()
    return sum(one.entry.size for one in (reader, *partners))


def is_fetched_whole(entry: Entry, visit: Visit) -> bool:
    """Whether a visit wants all of a small object, or nearly: several samples are spread over it.

    Whoever wants one sample of it asks for the header and that.
    """
    return entry.size <= SMALL_OBJECT_BYTES and visit.parts == 1 and visit.take != 1


def names_option(option: str, value: object, of: str = "names") -> tuple[str, ...] | None:
    """Return a list of names; None where all are meant.

    Args:
        option: of ``source.options``.
        value: of it.
        of: what the names are, in words.

    Raises:
        ConfigError: it is something else, or has a name twice.
    """
    if value is None:
        return None
    if isinstance(value, list | tuple) and value:
        plain = all(type(name) is str and name for name in value)
        if plain and len(set(value)) == len(value):
            return tuple(value)
    raise ConfigError(
        f"source.options.{option}: expected a list of different {of}, found {value!r}"
    )


def named_specs_option(option: str, value: object, such_as: str) -> Mapping[str, Any] | None:
    """Return names with what each of them shall be, None as it is found; None: all are meant.

    Args:
        option: of ``source.options``.
        value: of it: a list of names, or a mapping.
        such_as: a mapping, for whoever gave something else.

    Raises:
        ConfigError: it is neither.
    """
    if value is None:
        return None
    if isinstance(value, list | tuple):
        return dict.fromkeys(names_option(option, value) or ())
    if not isinstance(value, Mapping) or not value:
        raise ConfigError(
            f"source.options.{option}: expected a list of names, or a mapping such as {such_as}, "
            f"found {value!r}"
        )
    for name in value:
        if not isinstance(name, str) or not name:
            raise ConfigError(f"source.options.{option}: expected names, found {name!r}")
    return value


MOST_VISIT_SAMPLES = 4_000_000  # of a visit: 300 bytes each, whatever they hold


ENDLESS_PARTS = 1 << 40  # parts of a source that is no list of objects: never all drawn


def endless_entry(name: str) -> Entry:
    """Return what stands in the catalog for a source that is no list of objects.

    Args:
        name: of the function; the key of all its samples' origins.
    """
    return Entry(name, ENDLESS_PARTS, None, None)
