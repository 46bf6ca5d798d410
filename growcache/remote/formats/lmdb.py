"""LMDB data files: each value is a sample, read by byte range; nothing is copied to disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from growcache.errors import ConfigError, FormatError
from growcache.remote.formats.blob import load_decoder
from growcache.remote.formats.lmdb_few import few
from growcache.remote.formats.lmdb_tree import Found, Trees
from growcache.remote.formats.objects import (
    LARGEST_WHOLE,
    Measure,
    PartlyReadError,
    Reader,
    Visit,
    one_of,
    refuse_unknown,
)
from growcache.remote.formats.rows import MOST_SAMPLES
from growcache.remote.formats.threads import Call, Threads
from growcache.schema import Sample
from growcache.usercode import UserCode, short

_OPTIONS = ("database", "decode", "key")


class Values:
    """An object is a file of keys and values."""

    ranged = True
    listed = True

    def __init__(self, database: str | None, key: str, decode: UserCode | None) -> None:
        self._trees = Trees(database)
        self._key = key
        self._decode = decode
        self._threads = Threads()
        self.code_digest = decode.digest if decode else None

    async def measure(self, reader: Reader) -> Measure:
        """See `ObjectFormat.measure`."""
        top = await self._trees.top(reader)
        stride = max(1.0, reader.entry.size / max(1, top.entries))
        together = max(1, int(top.page_bytes / stride))  # small values: those of one page
        return Measure(stride, 0, top.entries, together)

    async def read(self, reader: Reader, visit: Visit) -> list[tuple[Sample, int, int]]:
        """See `ObjectFormat.read`; an origin is where the value lies, in bytes."""
        top = await self._trees.top(reader)
        if visit.take is None:
            found = await self._trees.find(reader, top, visit.part, visit.parts)
        else:
            found = await few(self._trees, reader, top, visit)
        _refuse_too_much(reader, found)
        values = await self._trees.fetch(reader, found)
        made = await self._made(reader.entry.key, found, values)
        samples = [
            (sample, one.start, one.stop)
            for sample, one in zip(made, found, strict=True)
            if sample is not None and not isinstance(sample, FormatError)
        ]
        bad = [one for one in made if isinstance(one, FormatError)]
        if bad:
            more = f" (and {len(bad) - 1:,} values more)" if len(bad) > 1 else ""
            raise PartlyReadError(f"{bad[0]}{more}", samples)
        return samples

    async def _made(
        self, name: str, found: Sequence[Found], values: Sequence[bytes]
    ) -> list[Sample | FormatError | None]:
        """Return what became of each value: a sample, a reason why not, or None."""
        decode = self._decode
        pairs = list(zip(found, values, strict=True))
        if decode is None:
            return [_tried(partial(self._plain, name, one.key, data)) for one, data in pairs]

        def decoded(key: bytes, data: bytes) -> Sample | None:
            result = decode(name, {"data": data, "key": key})
            return None if result is None else decode.sample(name, result)

        def work(call: Call) -> list[Sample | FormatError | None]:
            made = []
            for one, data in pairs:
                call.check()
                made.append(_tried(partial(decoded, one.key, data)))
            return made

        return await self._threads.run(work)

    def _plain(self, name: str, key: bytes, data: bytes) -> Sample:
        if self._key == "none":
            return {"data": data}
        if self._key == "bytes":
            return {"data": data, "key": key}
        try:
            return {"data": data, "key": key.decode()}
        except UnicodeDecodeError:
            raise FormatError(
                f"{short(name)}: its key {key[:40]!r} is no text; choose key: bytes"
            ) from None


def _tried(make: Callable[[], Sample | None]) -> Sample | FormatError | None:
    """Return what is made, or the reason why it cannot be: one value spoils no other."""
    try:
        return make()
    except FormatError as error:
        return error


def _refuse_too_much(reader: Reader, found: Sequence[Found]) -> None:
    nbytes = sum(one.stop - one.start for one in found)
    if nbytes > reader.entry.size:
        raise FormatError(
            f"{reader.entry.key}: damaged LMDB file: several values lie in the same place"
        )
    if nbytes > LARGEST_WHOLE or len(found) > MOST_SAMPLES:
        raise FormatError(
            f"{reader.entry.key}: one visit may read {LARGEST_WHOLE:,} bytes and "
            f"{MOST_SAMPLES:,} values, found {nbytes:,} bytes and {len(found):,} values; lower "
            "sampling.samples_per_object, or take fewer"
        )


def open_lmdb(options: Mapping[str, Any]) -> Values:
    """Return the format.

    Options:
        database: name of one of the file's databases; the unnamed one by default.
        key: ``str`` or ``bytes``: the value's key as field ``key``; ``none``.
        decode: ``package.module:function`` of ``data``, and ``key`` (bytes) if it takes it,
            that returns the sample; None to leave the value out. It runs in threads of the
            samplers, several at once.

    Raises:
        ConfigError: an unknown option, or a value that cannot be meant.
    """
    refuse_unknown("lmdb", options, _OPTIONS)
    database, decode = options.get("database"), options.get("decode")
    if database is not None and (not isinstance(database, str) or not database):
        raise ConfigError(f"source.options.database: expected a name, found {database!r}")
    key = one_of({"key": options.get("key") or "none"}, "key", ("none", "str", "bytes"), "none")
    if decode is not None and key != "none":
        raise ConfigError("source.options.key: goes with values as they are, not with decode")
    return Values(database, key, None if decode is None else load_decoder(decode))
