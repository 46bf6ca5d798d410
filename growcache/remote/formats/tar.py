"""Tar archives as WebDataset has them: members of one name are a sample, by byte range."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

from growcache.errors import ConfigError, FormatError, MissingLibraryError
from growcache.remote.formats.blob import load_decoder
from growcache.remote.formats.compressed import compression, read_unpacked
from growcache.remote.formats.named import different_names
from growcache.remote.formats.objects import (
    Found,
    Measure,
    PartlyReadError,
    Reader,
    Visit,
    refuse_unknown,
    true_or_false,
)
from growcache.remote.formats.pieces import Unpacked, block_of, picked, stretches
from growcache.remote.formats.records import MOST_BYTES
from growcache.remote.formats.rows import MOST_SAMPLES
from growcache.remote.formats.tar_samples import (
    SMALL,
    Blocks,
    Index,
    Packed,
    everything,
    refuse_nothing,
)
from growcache.remote.formats.tar_samples import Found as Unread
from growcache.remote.formats.tar_values import of_member
from growcache.remote.formats.threads import Call, Threads
from growcache.schema import Sample
from growcache.usercode import UserCode

KEY = "__key__"
_OPTIONS = ("fields", "decode", "index", "compression")
_DECODE = ("extension", "images", "none")
LEAST_BLOCK = 24  # what a visit reads in vain is about two samples
BLOCK_BYTES = 1 << 20
MOST_BLOCK_BYTES = 1 << 25
_SPOT = 1 << 19  # bytes, at the start and in the middle, by which an object is measured
_MOST_STRETCHES = 64


class Tar:
    """Samples of one archive."""

    listed = True

    def __init__(
        self,
        packed: str,
        fields: tuple[str, ...] | None,
        decode: str,
        code: UserCode | None,
        *,
        index: bool,
    ) -> None:
        self._packed = packed
        self._fields = fields
        self._decode = decode
        self._code = code
        self._samples: Blocks | Index = Index() if index else Blocks()
        self._threads = Threads()
        self.ranged = packed == "none"
        self.code_digest = code.digest if code else None

    async def measure(self, reader: Reader) -> Measure:
        """See `ObjectFormat.measure`."""
        refuse_nothing(reader)
        size = reader.entry.size
        if isinstance(self._samples, Index) and self.ranged:
            count = len(await self._samples.of(reader))
            return Measure(size / max(1, count), 0, count)
        if not self.ranged or size <= SMALL:
            found = await self._between(reader, 0, size)
            count = len(_some(found))
            stride = size / max(1, count)
        else:
            stride = await self._spotted(reader)
            count = max(1, round(size / stride))
        return Measure(
            max(1.0, stride),
            0,
            count,
            block_of(stride, LEAST_BLOCK, BLOCK_BYTES, MOST_BLOCK_BYTES) if self.ranged else 1,
        )

    async def _spotted(self, reader: Reader) -> float:
        half = reader.entry.size // 2
        found = _some(await self._between(reader, 0, min(half, _SPOT)))
        found += (await self._between(reader, half, half + min(half, _SPOT))).samples
        if not found:
            raise FormatError(
                f"{reader.entry.key}: expected members with an extension, such as 0001.jpg, "
                "found none"
            )
        return sum(sample.stop - sample.start for sample in found) / len(found)

    async def read(self, reader: Reader, visit: Visit) -> Found:
        """See `ObjectFormat.read`; an origin is a range of the bytes, unpacked ones."""
        refuse_nothing(reader)
        size = reader.entry.size
        start = visit.part * size // visit.parts
        stop = (visit.part + 1) * size // visit.parts
        if visit.take is not None and self.ranged and stop - start > 2 * SMALL:
            found = await self._stretches(reader, visit, start, stop)
        else:
            found = await self._between(reader, start, stop)
        if len(found.samples) > MOST_SAMPLES:
            raise FormatError(
                f"{reader.entry.key}: one visit may yield {MOST_SAMPLES:,} samples, found "
                f"{len(found.samples):,}"
            )
        samples = picked(found.samples, visit, reader.entry.key)
        return await self._made(reader, samples, found.wrong)

    async def _between(self, reader: Reader, start: int, stop: int) -> Unread:
        if not self.ranged:
            return await everything(Unpacked(reader, await read_unpacked(reader, self._packed)))
        if stop - start > MOST_BYTES:
            raise FormatError(
                f"{reader.entry.key}: one visit may read {MOST_BYTES:,} bytes of an archive, "
                f"found {stop - start:,}; lower sampling.samples_per_object"
            )
        return await self._samples.between(reader, start, stop)

    async def _stretches(self, reader: Reader, visit: Visit, start: int, stop: int) -> Unread:
        """Return samples of stretches at random, until there are enough to take some."""
        key = reader.entry.key
        found: dict[int, Unread] = {}
        for at, end in stretches(visit, key, start, stop, SMALL, most=_MOST_STRETCHES):
            found[at] = await self._between(reader, at, end)
            if sum(len(one.samples) for one in found.values()) >= (visit.take or 0):
                break
        wrong = next((one.wrong for one in found.values() if one.wrong), None)
        return Unread([sample for at in sorted(found) for sample in found[at].samples], wrong)

    async def _made(
        self, reader: Reader, samples: Sequence[Packed], wrong: FormatError | None
    ) -> Found:
        def work(call: Call | None) -> Found:
            return self._decoded(reader, samples, wrong, call)

        if self._code is not None:
            return await self._threads.run(work)
        return await asyncio.to_thread(work, None)

    def _decoded(
        self,
        reader: Reader,
        samples: Sequence[Packed],
        wrong: FormatError | None,
        call: Call | None,
    ) -> Found:
        found: Found = []
        bad = [str(wrong)] if wrong else []
        for packed in samples:
            if call is not None:
                call.check()
            try:
                sample = self._sample(reader, packed)
            except FormatError as error:
                bad.append(
                    f"{reader.entry.key}: {packed.key} at byte {packed.start:,}: {error}"
                )
                continue
            if sample is not None:
                found.append((sample, packed.start, packed.stop))
        if bad:
            more = f" (and {len(bad) - 1:,} more)" if len(bad) > 1 else ""
            raise PartlyReadError(bad[0] + more, found)
        return found

    def _sample(self, reader: Reader, packed: Packed) -> Sample | None:
        contents = _contents(packed, self._fields)
        if self._code is not None:
            key = reader.entry.key
            result = self._code(key, {"data": {KEY: packed.key, **contents}, "key": key})
            return None if result is None else self._code.sample(key, result)
        if self._decode == "none":
            sample: Sample = dict(contents)
        else:
            images = self._decode == "images"
            sample = {
                ext: of_member(data, ext, reader.entry, images=images)
                for ext, data in contents.items()
            }
        if self._fields is None or KEY in self._fields:
            sample[KEY] = packed.key
        return sample


def _contents(packed: Packed, fields: tuple[str, ...] | None) -> dict[str, bytes]:
    """Return the bytes of a sample's members by their extensions, those that are wanted.

    Raises:
        FormatError: one is missing, is there twice, or cannot be read.
    """
    found: dict[str, bytes] = {}
    for member, content in zip(packed.members, packed.contents, strict=True):
        if fields is not None and member.ext not in fields:
            continue
        if member.wrong:
            raise FormatError(f"{member.ext}: {member.wrong}")
        if member.ext in found:
            raise FormatError(f"it has two members {member.ext}")
        if len(content) < member.size:
            raise FormatError(
                f"{member.ext}: expected {member.size:,} bytes, found {len(content):,}"
            )
        found[member.ext] = bytes(content)
    for name in fields or ():
        if name != KEY and name not in found:
            has = ", ".join(member.ext for member in packed.members)
            raise FormatError(f"expected a member {name}, found {has[:160]}")
    return found


def _some(found: Unread) -> list[Packed]:
    """Return the samples of the first part of an object.

    Raises:
        FormatError: there are none, for something is wrong.
    """
    if found.wrong is not None and not found.samples:
        raise found.wrong
    return found.samples


def open_tar(options: Mapping[str, Any]) -> Tar:
    """Return the format.

    Options:
        fields: which members of a sample, by their extensions, and ``__key__``; all by default.
        decode: ``extension``: arrays, texts and numbers by it, images as they are; ``images``:
            these as uint8 [height, width, 3], too; ``none``: all as bytes; or
            ``package.module:function`` of ``data``, the bytes by extension with ``__key__``, and
            ``key`` of the object if it takes it, that returns the sample, None for none.
        index: true: where samples begin is found out by walking over all headers of an object
            first. For members that are tar archives, and for archives put together.
        compression: ``auto`` (by the endings in source.url), ``none``, ``gzip``, ``zlib``, ``zstd``.

    Raises:
        ConfigError: an unknown option, or a value that cannot be meant.
    """
    refuse_unknown("tar", options, _OPTIONS)
    index = true_or_false(options, "index")
    decode = str(options.get("decode", "extension") or "none")  # YAML's null means it, too
    if decode not in _DECODE and ":" not in decode:
        raise ConfigError(
            f"source.options.decode: expected {', '.join(_DECODE)} or package.module:function, "
            f"found {decode!r}"
        )
    if decode == "images" and importlib.util.find_spec("PIL") is None:
        raise MissingLibraryError(
            "source.options.decode: needs Pillow; pip install 'growcache[image]'"
        )
    code = load_decoder(decode) if ":" in decode else None
    fields = _fields(options.get("fields"))
    return Tar(compression(options, ()), fields, decode, code, index=index)


def _fields(value: object) -> tuple[str, ...] | None:
    if isinstance(value, list | tuple):
        value = [_extension(name) for name in value]
    fields = different_names("fields", value, "extensions, such as [jpg, cls]")
    if fields == (KEY,):
        raise ConfigError(f"source.options.fields: expected an extension beside {KEY}")
    return fields


def _extension(name: object) -> object:
    return name.removeprefix(".").lower() if isinstance(name, str) else name
