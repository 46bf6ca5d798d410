"""Looking at a few objects before there is a schema: what samples are, and which sizes differ."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

from growcache.errors import FormatError, StoreError, TransientStoreError
from growcache.remote.formats import Measure, ObjectFormat, Visit
from growcache.remote.store import Entry, Store, StoreReader
from growcache.sampling.fill import Filler
from growcache.sampling.messages import Message, Permit, Stop
from growcache.schema import Sample, Schema, sample_bytes

PROBE_OBJECTS = 8  # looked at together
PROBE_BYTES = 16_000_000  # of the objects looked at, after the first; a slow link shows them
AGREEING = 0.75  # of the samples make a schema; the others will be holes


@dataclass(frozen=True, slots=True)
class Probed:
    """What one object showed."""

    measure: Measure
    samples: Sequence[Sample]


def settle(schemas: Sequence[Schema]) -> Schema:
    """Return the schema of a cache whose first samples have these.

    One that most of them have is it: few of another shape are errors in the data, and would
    make everything ragged. Where shapes differ more than that, the dimensions that differ
    are ragged.

    Raises:
        FormatError: they differ in names, dtypes or numbers of dimensions, too.

    >>> from growcache.schema import Field
    >>> rows = {n: Schema((Field("x", "<f4", (n, 8)),)) for n in (3, 4, 5)}
    >>> str(settle([rows[3]] * 7 + [rows[4]])), str(settle([rows[3], rows[4], rows[5]]))
    ('x: float32[3, 8]', 'x: float32[?, 8]')
    """
    common, votes = Counter(schemas).most_common(1)[0]
    if votes >= AGREEING * len(schemas):
        return common
    kind, alike = Counter(map(_kind, schemas)).most_common(1)[0]
    if alike >= AGREEING * len(schemas):
        schemas = [schema for schema in schemas if _kind(schema) == kind]
    try:
        return Schema.covering(schemas)
    except FormatError as error:
        raise FormatError(
            f"{error}; make them alike in sampling.transform, or say what is meant in "
            "sampling.schema"
        ) from None


def _kind(schema: Schema) -> tuple[tuple[str, str, int], ...]:
    """Return what must agree where only sizes differ."""
    return tuple((field.name, field.dtype, len(field.shape)) for field in schema.fields)


def chunk(entries: Sequence[Entry], *, ranged: bool) -> Sequence[Entry]:
    """Return the first of the entries: so many as may be looked at together, at least one."""
    together, nbytes = 1, 0
    for entry in entries[1:PROBE_OBJECTS]:
        nbytes += 0 if ranged else entry.size
        if nbytes > PROBE_BYTES:
            break
        together += 1
    return entries[:together]


class Prober:
    """Reads objects as a permit would, but for one sample or two of each.

    Args:
        store: what is read from.
        format_: how objects are decoded.
        filler: that transforms what is found.
        seed: of everything random.
        wish: the schema that the user declared.
    """

    def __init__(
        self,
        store: Store,
        format_: ObjectFormat,
        filler: Filler,
        seed: int,
        wish: Schema | None,
    ) -> None:
        self._store = store
        self._format = format_
        self._filler = filler
        self._seed = seed
        self._wish = wish

    async def probe(self, entries: Sequence[Entry]) -> Message:
        """Return what the first of these objects show, or why none of them can be read."""
        if self._wish is None:
            entries = chunk(entries, ranged=self._format.ranged)
        else:
            entries = entries[:1]
        looks = [self._look(entry) for entry in entries]
        found = await asyncio.gather(*looks, return_exceptions=True)
        for result in found:
            if isinstance(result, TransientStoreError):
                # Not the objects' fault: others might give another schema.
                return {"type": "probed", "transient": str(result)}
            if isinstance(result, BaseException) and not isinstance(
                result, StoreError | FormatError
            ):
                raise result
        probed = [result for result in found if isinstance(result, Probed)]
        if probed:
            return self._message(probed)
        reasons = zip(entries, found, strict=True)
        return {"type": "probed", "errors": [f"{entry.key}: {why}" for entry, why in reasons]}

    def _message(self, probed: Sequence[Probed]) -> Message:
        samples = [sample for one in probed for sample in one.samples]
        try:
            schema = self._wish or settle([Schema.of(sample) for sample in samples])
        except FormatError as error:
            return {"type": "probed", "mixed": str(error)}
        return {
            "type": "probed",
            "measure": asdict(probed[0].measure),
            "schema": schema.to_json(),
            "sample_bytes": fmean(map(sample_bytes, samples)),
        }

    async def _look(self, entry: Entry) -> Probed:
        reader = StoreReader(self._store, entry)
        measure = await self._format.measure(reader)
        stop = Stop(entry, 0, max(1, measure.samples))
        found = await self._format.read(reader, Visit(0, stop.parts, 0, self._seed, None))
        if not found:
            raise FormatError("it holds no sample")
        permit = Permit("probe", 0, 0, 0, (0,), (stop,))
        ends = found[:1] + found[1:][-1:]  # those of one object may differ, too
        visited = self._filler.prepared(permit, stop, ends, self._wish)
        if not visited.samples:
            raise FormatError("sampling.transform returned None for its first sample")
        return Probed(measure, visited.samples)
