"""Compressed objects: detect the compression, and decompress within bounds."""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from growcache.errors import FormatError, MissingLibraryError
from growcache.formats.base import ObjectReader, choice_option, read_whole, require_library
from growcache.formats.memory import correct_decoded, reserve_decoded
from growcache.store.contract import Entry

if TYPE_CHECKING:
    from typing_extensions import Buffer


CHOICES = ("auto", "none", "gzip", "zlib", "zstd")
INFERRED = "inferred"  # from each object's name and first bytes; not a user's choice
MOST_UNPACKED = 500_000_000  # the bytes and their samples are in memory together
MOST_COMPRESSION_RATIO = 1032  # gzip's best; an object that exceeds it is hostile
_SMALL_BYTES = 1 << 20  # that any object may unpack to
_LIKELY_BYTES, _MOST_LIKELY_RATIO = 48_000_000, 100  # limits of records; more is a bomb
_HEAD_BYTES = 1024
_COPIES = 2  # of the unpacked bytes, while the pieces are joined
USUAL_RATIO = 4
_ZSTD_HEAD = 18  # bytes of a frame's head
_SUFFIXES = {
    ".gz": "gzip", ".gzip": "gzip", ".tgz": "gzip", ".zz": "zlib",
    ".zst": "zstd", ".zstd": "zstd", ".tzst": "zstd",
}  # fmt: skip
_MAGIC = {"gzip": b"\x1f\x8b", "zstd": b"\x28\xb5\x2f\xfd"}
MAGIC_BYTES = 4
_ZLIB_STEP = 1 << 14  # bytes, which can become 16 MB
_ZSTD_STEP = 512  # bytes, of which every four can become 128 kB at once
_ZSTD_WINDOW = 1 << 27  # bytes; `zstd --ultra -22` needs no more


UnpackLimit: TypeAlias = Callable[[bytes, int], int]
"""Returns the bytes that an object may unpack to.

The arguments are its first unpacked bytes, and the number of packed bytes that were read.
"""


def limit_of_records(_: bytes, packed: int) -> int:
    return _LIKELY_BYTES + _MOST_LIKELY_RATIO * packed


def limit_where(begins: Callable[[bytes], bool]) -> UnpackLimit:
    """Return a limit for valid records, which may be nearly empty masks or repeated lines.

    Args:
        begins: Tells whether the first bytes start a record; zeros do not.
    """

    def limit(head: bytes, packed: int) -> int:
        return MOST_UNPACKED if begins(head) else limit_of_records(head, packed)

    return limit


def compression_option(options: Mapping[str, Any], urls: Sequence[str]) -> str:
    """Return the compression of all objects, or `INFERRED` if their names may differ in it."""
    if options.get("compression") == INFERRED:
        return INFERRED
    chosen = choice_option(options, "compression", CHOICES, "auto")
    if chosen == "auto":
        kinds = set(map(_compression_of_url, urls)) or {"none"}
        chosen = kinds.pop() if len(kinds) == 1 else INFERRED
    if chosen == "zstd":
        _zstandard()
    return chosen


def _compression_of_url(url: str) -> str:
    """Return the compression that the end of a URL implies for all matching names.

    >>> [_compression_of_url(f"s3://b/{glob}") for glob in ("*.jsonl", "*.jsonl.gz", "*", "*z")]
    ['none', 'gzip', 'inferred', 'inferred']
    """
    if kind := compression_by_name(url):
        return kind
    is_glob = re.search(r"[*?\[]", url) and not re.match("https?:", url)
    tail = re.split(r"[*?\]]", url)[-1].lower()
    undecided = is_glob and any(ending.endswith(tail) for ending in _SUFFIXES)
    return INFERRED if undecided else "none"


def compression_by_name(name: str) -> str | None:
    return next((kind for end, kind in _SUFFIXES.items() if name.lower().endswith(end)), None)


def compression_of(head: bytes) -> str | None:
    return next((kind for kind, magic in _MAGIC.items() if head.startswith(magic)), None)


def unpacked_name(name: str) -> str:
    """Return an object's name without the ending of its compression.

    >>> unpacked_name("a/b.jsonl.gz"), unpacked_name("a/b.tgz"), unpacked_name("a/b.tar")
    ('a/b.jsonl', 'a/b.tar', 'a/b.tar')
    """
    ending = next((end for end in _SUFFIXES if name.lower().endswith(end)), "")
    tar = ".tar" if ending in (".tgz", ".tzst") else ""
    return name[: len(name) - len(ending)] + tar


def unpacked_start(head: bytes, kind: str) -> bytes:
    try:
        make, step, wrong = _unpacker(kind)
    except MissingLibraryError:  # opening the format will raise it
        return b""
    stream, found = make(), bytearray()
    for at in range(0, len(head), step):
        try:
            found += stream.decompress(head[at : at + step])
        except wrong:
            break
        if stream.eof or len(found) > _SMALL_BYTES:
            break
    return bytes(found[:_SMALL_BYTES])


def refuse_compressed(entry: Entry, head: bytes) -> None:
    if kind := compression_of(head):
        raise FormatError(
            f"{entry.key}: is compressed by {kind}; set compression: {kind} in source.options",
            code="GC303",
        )


async def read_unpacked(
    reader: ObjectReader, kind: str, limit: UnpackLimit = limit_of_records
) -> Buffer:
    """Return an object's unpacked bytes, or its bytes as they are if it is not compressed."""
    named = kind != INFERRED or compression_by_name(reader.entry.key) is not None
    if named and reader.entry.size > MOST_UNPACKED:
        packed = f"{reader.entry.size:,} compressed ones"
        raise _too_large_error(reader.entry, MOST_UNPACKED, packed)
    data = await (reader.read() if named else read_whole(reader))
    if kind == INFERRED:
        kind = _found_compression(reader.entry, bytes(memoryview(data)[:MAGIC_BYTES]))
    if kind == "none":
        return data
    most = _most_unpacked(memoryview(data))
    likely = min(most, likely_unpacked(data, kind))
    for expected in (likely, most):
        await reserve_decoded(_COPIES * expected)
        found = await asyncio.to_thread(unpack, data, kind, reader.entry, expected, limit)
        correct_decoded(len(found or b""), _COPIES * expected)
        if found is not None:
            return found
    raise _too_large_error(reader.entry, most)


def _found_compression(entry: Entry, head: bytes) -> str:
    """Return the compression by the first bytes, because some servers unpack objects named `.gz`."""
    kind = compression_of(head) or "none"
    if kind == "none" and compression_by_name(entry.key) == "zlib":
        kind = "zlib"
    try:
        _unpacker(kind if kind != "none" else "zlib")
    except MissingLibraryError as error:
        raise FormatError(f"{entry.key}: {error}", code=error.code) from None
    return kind


def likely_unpacked(data: Buffer, kind: str) -> int:
    """Return the unpacked size that an object claims, or a multiple of its size.

    >>> import gzip
    >>> likely_unpacked(gzip.compress(bytes(10_000)), "gzip")
    10000
    """
    view = memoryview(data).cast("B")
    said = 0
    if kind == "gzip" and view.nbytes >= 4:  # the claim is of the last stream
        said = int.from_bytes(view[-4:], "little")
    elif kind == "zstd":
        said = _zstd_content_size(bytes(view[:_ZSTD_HEAD]))
    return max(said, USUAL_RATIO * view.nbytes)


def _zstd_content_size(head: bytes) -> int:
    zstandard = _zstandard()
    try:
        return max(0, int(zstandard.frame_content_size(head)))
    except zstandard.ZstdError:  # unpacking will report the damage
        return 0


def _most_unpacked(view: memoryview) -> int:
    return min(MOST_UNPACKED, MOST_COMPRESSION_RATIO * view.nbytes + _SMALL_BYTES)


def _too_large_error(entry: Entry, most: int, found: str = "more") -> FormatError:
    return FormatError(
        f"{entry.key}: a compressed object may be unpacked to at most {most:,} bytes in "
        f"memory, found {found}; make smaller objects, or store it without compression, so "
        "that it is read by range",
        code="GC305",
    )


def unpack(
    data: Buffer,
    kind: str,
    entry: Entry,
    expected: int | None = None,
    limit: UnpackLimit = limit_of_records,
) -> bytes | None:
    """Return the unpacked bytes of all streams of an object, or None if more than ``expected``."""
    view = memoryview(data)
    most = _most_unpacked(view)
    pieces: list[bytes] = []
    found, head = 0, b""
    try:
        for piece, packed in _unpack_steps(view, kind, entry):
            pieces.append(piece)
            found += len(piece)
            if len(head) < _HEAD_BYTES:
                head = (head + piece[:_HEAD_BYTES])[:_HEAD_BYTES]
            if found > (allowed := min(most, limit(head, packed))):
                raise _too_large_error(entry, allowed)
            if expected is not None and found > expected:
                return None
        return b"".join(pieces)
    finally:
        pieces.clear()  # an error on its way keeps a reference to them


def _unpack_steps(view: memoryview, kind: str, entry: Entry) -> Iterator[tuple[bytes, int]]:
    """Yield unpacked bytes, each with the number of packed bytes read.

    Steps are small, because a few bytes can expand a thousandfold.
    """
    make, step, wrong = _unpacker(kind)
    stream, at = make(), 0
    while at < view.nbytes:
        packed = bytes(view[at : at + step])
        if stream.eof:
            padded = len(packed) - len(packed.lstrip(b"\0"))
            at, packed = at + padded, packed[padded:]
            stream = make() if packed else stream
        try:
            yield stream.decompress(packed) if packed else b"", at + len(packed)
        except wrong as error:
            raise _damaged_error(entry, kind, str(error)) from None
        at += len(packed) - len(stream.unused_data if packed else b"")
    if at and not stream.eof:
        raise _damaged_error(entry, kind, "it is cut off")


def _unpacker(kind: str) -> tuple[Callable[[], Any], int, type[Exception]]:
    """Return a maker of streams, the input bytes per step, and the error that streams raise."""
    if kind == "zstd":
        zstandard = _zstandard()
        unpacker = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
        return unpacker.decompressobj, _ZSTD_STEP, zstandard.ZstdError
    wbits = {"gzip": 31, "zlib": 15}[kind]
    return lambda: zlib.decompressobj(wbits), _ZLIB_STEP, zlib.error


def _damaged_error(entry: Entry, kind: str, why: str) -> FormatError:
    return FormatError(f"{entry.key}: expected an object compressed by {kind}, found: {why}")


def _zstandard() -> Any:
    require_library("source.options.compression:", "zstandard", "zstd")
    import zstandard

    return zstandard
