"""A sampler's look at a few objects before there is a schema.

`schema_search` is the supervisor's side.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from statistics import fmean, median

from growcache.errors import (
    BudgetSpentError,
    FormatError,
    StoreError,
    StoreRefusedError,
    TransientStoreError,
)
from growcache.formats.base import Measure, ObjectFormat, Visit, measure_object, read_partly
from growcache.sampling.fill import GroupFiller
from growcache.sampling.messages import Message, PartVisit, Permit, awaited_event, hole_reason
from growcache.sampling.sources import Sources
from growcache.schema import Sample, Schema, sample_bytes
from growcache.store.contract import Entry
from growcache.usercode import short_key

PROBE_OBJECTS = 8  # probed together
LOOKS = 8  # at samples, over all of these objects
MOST_LOOKS = 256  # at samples of one object, if the user's code skips the first ones
PROBE_BYTES = 16_000_000  # of the probed objects after the first, which matters on a slow link
_TAR_KEY = "__key__"  # field of samples from tar archives
AGREEING = 0.75  # of the samples make a schema; the others become holes


@dataclass(frozen=True, slots=True)
class ProbedSample:
    schema: Schema
    nbytes: int


@dataclass(frozen=True, slots=True)
class ProbedObject:
    visit: PartVisit
    measure: Measure
    samples: Sequence[ProbedSample]


class PassedOverError(FormatError):
    """An object can be read, but the user's code skips all probed samples."""


def settled_schema(schemas: Sequence[Schema]) -> Schema:
    """Return the schema of a cache from those of its first samples.

    The schema of most samples wins, because a few samples of another shape are errors in the
    data, and would make everything ragged. If shapes differ more than that, the differing
    dimensions are ragged.

    >>> from growcache.schema import Field
    >>> rows = {n: Schema((Field("x", "<f4", (n, 8)),)) for n in (3, 4, 5)}
    >>> str(settled_schema([rows[3]] * 7 + [rows[4]])), str(settled_schema([rows[3], rows[4], rows[5]]))
    ('x: float32[3, 8]', 'x: float32[?, 8]')
    """
    common, votes = Counter(schemas).most_common(1)[0]
    if votes >= AGREEING * len(schemas):
        return common
    kind, alike = Counter(map(_names_and_dtypes, schemas)).most_common(1)[0]
    if alike >= AGREEING * len(schemas):
        schemas = [schema for schema in schemas if _names_and_dtypes(schema) == kind]
    try:
        return Schema.covering(schemas)
    except FormatError as error:
        advice = _dotted_names_advice(schemas) or (
            "make them alike in sampling.transform, or say what is meant in sampling.schema"
        )
        raise FormatError(f"{error}; {advice}", code=error.code) from None


def _with_empty_lists(schemas: Sequence[Schema]) -> Sequence[Schema]:
    """Return the schemas, with the fields of empty lists changed to those of most other samples.

    >>> from growcache.schema import Field
    >>> found = [Schema((Field("boxes", *of),)) for of in (("<f8", (0,)), ("<i8", (2, 4)))]
    >>> str(_with_empty_lists(found)[0])
    'boxes: int64[0, 4]'
    """
    fields = [field for schema in schemas for field in schema.fields]
    if not any(field.is_of_an_empty_list for field in fields):
        return schemas
    full = Counter(f.emptied() for f in fields if f.shape and not f.is_of_an_empty_list)
    emptied = {field.name: field for field, _ in reversed(full.most_common())}
    return [
        Schema(
            tuple(
                emptied.get(field.name, field) if field.is_of_an_empty_list else field
                for field in schema.fields
            )
        )
        for schema in schemas
    ]


def _dotted_names_advice(schemas: Sequence[Schema]) -> str:
    """Return advice if the extensions of WebDataset's members contain dots."""
    names = [set(schema.names) for schema in schemas if _TAR_KEY in schema.names]
    differing = set[str]().union(*names) - set[str].intersection(*names) if names else set()
    if not differing or not all("." in name for name in differing):
        return ""
    name = min(differing)
    return (
        f"WebDataset ends a sample's name at the first dot, so a member NAME.{name} is the field {name!r} "
        f"of NAME, and not {name.rpartition('.')[2]!r} of NAME.{name.rpartition('.')[0]}: rename the members "
        "without such dots"
    )


def _names_and_dtypes(schema: Schema) -> tuple[tuple[str, str, int], ...]:
    return tuple((field.name, field.dtype, len(field.shape)) for field in schema.fields)


def probed_together(
    objects: Sequence[PartVisit], reads_whole: Callable[[Entry], bool]
) -> Sequence[PartVisit]:
    """Return the first objects, at least one, that may be read together."""
    together, nbytes = 1, 0
    for one in objects[1:PROBE_OBJECTS]:
        nbytes += one.entry.size if reads_whole(one.entry) else 0
        if nbytes > PROBE_BYTES:
            break
        together += 1
    return objects[:together]


def probe_order(count: int, first: int) -> Iterator[list[int]]:
    """Yield batches of ``first`` numbers below ``count``: an even spread, and then the others.

    >>> list(probe_order(5, 2))
    [[0, 4], [1, 2], [3]]
    """
    spread = sorted({i * (count - 1) // max(1, first - 1) for i in range(first)})
    yield spread
    others = (i for i in range(min(count, MOST_LOOKS)) if i not in spread)
    while batch := list(islice(others, first)):
        yield batch


class SchemaProbe:
    """Reads a few samples of objects as a permit would."""

    def __init__(
        self,
        sources: Sources,
        filler: GroupFiller,
        seed: int,
        declared: Schema | None,
    ) -> None:
        self._sources = sources
        self._filler = filler
        self._seed = seed
        self._declared = declared

    async def probe(self, objects: Sequence[PartVisit]) -> Message:
        """Return the findings about the first of these objects of one source, or their errors."""
        object_format, began, listed = self._format_of(objects[0]), time.monotonic(), objects
        objects = probed_together(objects, object_format.reads_whole)
        wanted = -(-LOOKS // len(objects))
        looks = [self._counted(self._look(one, wanted)) for one in objects]
        found = await asyncio.gather(*looks, return_exceptions=True)
        if spent := next((one for one in found if isinstance(one, BudgetSpentError)), None):
            raise spent  # a schema from fewer objects would depend on the budget
        set_aside = 0
        for visit, result in zip(objects, found, strict=True):
            if isinstance(result, TransientStoreError):
                if not await self._fails_alone(visit, result, began, listed):
                    # The objects are not at fault, and others might give another schema.
                    return {"type": "probed", "transient": awaited_event(result)}
                set_aside += 1
            elif isinstance(result, BaseException) and not isinstance(
                result, StoreError | FormatError
            ):
                raise result
        probed = [result for result in found if isinstance(result, ProbedObject)]
        if probed:
            advice = await self._advice(object_format, probed[0].visit)
            return {**self._message(probed), "advice": advice}
        # The first reason is shown. Unreadable objects tell more than empty ones.
        reasons = sorted(
            zip(objects, found, strict=True),
            key=lambda one: isinstance(one[1], PassedOverError),
        )
        return {
            "type": "probed",
            "errors": [hole_reason(one.entry.key, why) for one, why in reasons],
            "passed_over": sum(isinstance(why, PassedOverError) for why in found),
            "set_aside": set_aside,
        }

    async def _advice(self, object_format: ObjectFormat, visit: PartVisit) -> str:
        try:
            return await object_format.advice(self._sources.reader(visit.entry, visit.partners))
        # The object was read, so it can be drawn without advice.
        except (StoreError, FormatError):
            return ""

    async def _fails_alone(
        self,
        visit: PartVisit,
        error: TransientStoreError,
        began: float,
        listed: Sequence[PartVisit],
    ) -> bool:
        if isinstance(error, StoreRefusedError):
            return False
        since = began if error.since is None else error.since
        others = [one.entry for one in listed if one.entry.key != visit.entry.key]
        return await self._sources.fails_alone(visit.entry, since, others)

    async def _counted(self, look: Awaitable[ProbedObject]) -> ProbedObject:
        """Await a look, with its decoded bytes counted like those of a visit."""
        with self._filler.gate.visit(None):
            return await look

    def _format_of(self, visit: PartVisit) -> ObjectFormat:
        return self._sources.format_of(visit.entry)

    def _message(self, probed: Sequence[ProbedObject]) -> Message:
        looked = [(one, seen) for one in probed for seen in one.samples]
        found = _with_empty_lists([seen.schema for _, seen in looked])
        try:
            schema = self._declared or settled_schema(found)
        except FormatError as error:
            examples = _examples([(one.visit.entry.key, seen.schema) for one, seen in looked])
            return {"type": "probed", "mixed": f"{examples}{error}"}
        # An odd sample, which becomes a hole, proves nothing about the sizes of the others.
        fitting = [pair for pair, its in zip(looked, found, strict=True) if schema.allows(its)]
        measures = [one.measure for one, _ in fitting]
        if not self._format_of(probed[0].visit).ranged:
            # A visit returns the whole object, and a large object proves nothing about others.
            measures.sort(key=lambda measure: measure.samples)
            measures = measures[(len(measures) - 1) // 2 :]
        return {
            "type": "probed",
            "measure": asdict(measures[0]),
            "samples_per_object": fmean(one.measure.samples for one in probed),
            "schema": schema.to_json(),
            # One large sample among the probed ones must not determine the sizes of all.
            "sample_bytes": median(seen.nbytes for _, seen in fitting),
        }

    async def _look(self, one: PartVisit, wanted: int) -> ProbedObject:
        if self._format_of(one).reads_whole(one.entry):
            return await self._look_at_whole(one, wanted)
        return await self._look_at_parts(one, wanted)

    async def _look_at_parts(self, one: PartVisit, wanted: int) -> ProbedObject:
        object_format, reader = (
            self._format_of(one),
            self._sources.reader(one.entry, one.partners),
        )
        measure = await measure_object(object_format, reader)
        if measure.together > 1:
            return await self._look_at_units(one, wanted, measure)
        parts = max(1, measure.samples)
        samples: list[Sample] = []
        holes: list[str] = []
        for batch in probe_order(parts, wanted):
            visits = [replace(one, part=part, parts=parts) for part in batch]
            calls = [
                self._filler.visit(_permit(visit), visit, self._declared) for visit in visits
            ]
            for visited in await asyncio.gather(*calls):
                samples += visited.samples
                holes += [visited.hole] if visited.hole is not None else []
            # An error in one part of an object also concerns the next part; draws differ.
            if len(samples) >= wanted or (holes and object_format.listed):
                break
        if samples:
            return ProbedObject(one, measure, _probed_samples(samples))
        raise (FormatError(holes[0]) if holes else _no_sample_error(object_format, measure))

    async def _look_at_units(
        self, one: PartVisit, wanted: int, measure: Measure
    ) -> ProbedObject:
        """Look at samples of chunks or row groups, each of which is read whole."""
        parts = max(1, measure.samples // measure.together)
        samples: list[Sample] = []
        # Some samples of a unit, and then all, because the user's code may skip the first ones.
        looks = [(part, take) for take in (LOOKS, None) for part in range(min(parts, LOOKS))]
        for part, take in looks:
            visit = replace(one, part=part, parts=parts)
            visited = await self._filler.visit(_permit(visit, take), visit, self._declared)
            if visited.hole is not None and not visited.samples:
                raise FormatError(visited.hole)
            samples += visited.samples
            if len(samples) >= wanted:
                break
        if samples:
            return ProbedObject(one, measure, _probed_samples(samples))
        raise _no_sample_error(self._format_of(one), measure)

    async def _look_at_whole(self, visit: PartVisit, wanted: int) -> ProbedObject:
        object_format, reader = (
            self._format_of(visit),
            self._sources.reader(visit.entry, visit.partners),
        )
        format_visit = Visit(0, 1, 0, self._seed, None)
        found, _ = await read_partly(object_format, reader, format_visit)
        wanted = max(2, wanted)
        samples: list[Sample] = []
        for batch in probe_order(len(found), wanted) if found else ():
            some = [found[i] for i in batch]
            samples += self._filler.prepared(
                _permit(visit), visit, some, self._declared
            ).samples
            if len(samples) >= wanted:
                break
        measure = await object_format.measure(reader)
        if samples:
            return ProbedObject(visit, measure, _probed_samples(samples))
        raise _no_sample_error(object_format, replace(measure, samples=len(found)))


def _probed_samples(samples: Sequence[Sample]) -> list[ProbedSample]:
    return [
        ProbedSample(Schema.from_sample(sample), sample_bytes(sample)) for sample in samples
    ]


def _no_sample_error(object_format: ObjectFormat, measure: Measure) -> PassedOverError:
    if not measure.samples:
        return PassedOverError(
            f"it holds no sample: {measure.empty}" if measure.empty else "it holds no sample"
        )
    who = (
        "sampling.transform" if object_format.listed else "source.format or sampling.transform"
    )
    return PassedOverError(f"{who} returned None for every sample looked at", code="GC309")


def _permit(visit: PartVisit, take: int | None = None) -> Permit:
    return Permit("probe", 0, 0, 0, (0,), (visit,), take)


def _examples(looked: Sequence[tuple[str, Schema]]) -> str:
    """Return two objects whose samples differ in names or dtypes, if any do."""
    first, kind = looked[0][0], _names_and_dtypes(looked[0][1])
    for key, schema in looked:
        if _names_and_dtypes(schema) != kind:
            return f"{short_key(first)} and {short_key(key)}: "
    return ""
