"""``growcache export``: copy what a cache holds now into a folder of its own.

The copy is made beside its place and renamed: it is there as a whole or not at all. It can
be read without growcache, and it is a complete cache of its own that loaders take.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from growcache.cache.adoption import adopt
from growcache.cache.cache import Cache
from growcache.cache.files import (
    BLOCK_BYTES,
    DIRECTORY_MODE,
    FILE_MODE,
    SIDECAR,
    Layout,
    allocated,
    fsync_directory,
)
from growcache.cache.formats import CACHE_FORMATS
from growcache.cache.formats.mapped import Buffer
from growcache.cache.identity import read_identity, write_identity
from growcache.cache.index import ShardRow
from growcache.cache.packing import pack
from growcache.cache.readers import NO_JOB
from growcache.cache.seal import Seal
from growcache.config import CacheConfig
from growcache.errors import CacheError, CacheFullError, ConfigError, CorruptShardError
from growcache.loading.snapshot import Snapshot
from growcache.service.export_notes import write_notes
from growcache.service.terminal import redraws
from growcache.service.words import in_bytes, plural

INDEX_BYTES = 64 << 20  # for the index of the copy, generously; it is not set aside
ROW_BYTES = 1024

OnBytes = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Exported:
    """What was copied."""

    samples: int
    shards: int
    nbytes: int


def export_cache(
    root: Path,
    out: Path,
    *,
    samples: int | None = None,
    cache_format: str | None = None,
    shared: bool = False,
) -> str:
    """Copy a cache's newest snapshot; return what to tell.

    Args:
        root: of the cache; a service may run on it, and readers.
        out: a folder that does not exist yet, or is empty.
        samples: about how many: as many whole shards, the newest, as hold so many.
        cache_format: of the copy; None: as it is.
        shared: whether others may read the copy, as far as the umask allows.

    Raises:
        CacheMissingError: there is no cache, or no sample in it yet.
        ConfigError: ``out`` cannot be taken.
        CacheFullError: the disk has no room for the copy.
        CorruptShardError: a shard is damaged; nothing is left behind.
    """
    _refuse_taken(out)
    if cache_format not in (None, *CACHE_FORMATS):
        known = " or ".join(sorted(CACHE_FORMATS))
        raise ConfigError(f"--format: expected {known}, found {cache_format!r}")
    with Snapshot.take(root, job=NO_JOB) as snapshot:
        rows = newest(snapshot.shards, samples)
        total = sum(path.stat().st_size for row in rows for path in _files(snapshot, row))
        _require_room(out.absolute().parent, total + len(rows) * ROW_BYTES)
        with _appearing(out) as folder, _progress(total) as advance:
            wanted = cache_format or snapshot.view.cache_format
            _copy(snapshot, root, rows, folder, wanted, advance)
            write_notes(folder, snapshot, rows, wanted)
            _permit(folder, shared=shared)
    found = Exported(sum(row.samples for row in rows), len(rows), total)
    return (
        f"Copied {plural(found.samples, 'sample')} in {plural(found.shards, 'shard')} "
        f"({in_bytes(found.nbytes)}) to {out}; {out / 'README.md'} says how to read them."
    )


def newest(rows: Sequence[ShardRow], samples: int | None) -> list[ShardRow]:
    """Return the last shards that together hold so many samples, in their order."""
    kept: list[ShardRow] = []
    for row in reversed(rows):
        if samples is not None and sum(k.samples for k in kept) >= samples:
            break
        kept.append(row)
    return kept[::-1]


def _refuse_taken(out: Path) -> None:
    if out.is_dir() and not any(out.iterdir()):
        return
    if out.exists():
        what = "is not empty" if out.is_dir() else "is a file"
        raise ConfigError(f"{out} {what}; name a folder that is new")
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"there is no folder {out.absolute().parent}; make it first")


def _require_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CacheFullError(
            f"the copy takes {in_bytes(needed)}, and {in_bytes(free)} are free in {folder}; "
            "name another folder, or fewer --samples"
        )


@contextmanager
def _appearing(out: Path) -> Iterator[Path]:
    """Yield a folder that becomes ``out`` once the block has ended well."""
    made = out.absolute().with_name(f".{out.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        made.mkdir(DIRECTORY_MODE)
        yield made
        fsync_directory(made)
        made.rename(out)  # over an empty folder, too
    except OSError as error:
        if isinstance(error, CacheError):
            raise
        kind = CacheFullError if error.errno == errno.ENOSPC else ConfigError
        raise kind(f"cannot write {out}: {error.strerror}; nothing was copied") from None
    finally:
        shutil.rmtree(made, ignore_errors=True)  # it is not there any more if all went well


@contextmanager
def _progress(total: int) -> Iterator[OnBytes]:
    # On the error stream, so that the output stays clean where it is read by a program.
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not redraws(sys.stderr)) as shown:
        task = shown.add_task("copying shards", total=total)
        yield lambda nbytes: shown.advance(task, nbytes)


def _copy(
    snapshot: Snapshot,
    root: Path,
    rows: Sequence[ShardRow],
    folder: Path,
    cache_format: str,
    advance: OnBytes,
) -> None:
    layout = Layout(folder)
    adopt(layout)
    identity = read_identity(root)
    assert identity is not None  # it is written before the first shard
    parts = {**identity.parts, "cache.format": cache_format}
    write_identity(folder, replace(identity, parts=parts))
    for row in rows:
        if cache_format == snapshot.view.cache_format:
            for path in _files(snapshot, row):
                target = layout.shards / path.relative_to(Layout(root).shards)
                target.parent.mkdir(exist_ok=True)
                _copy_file(path, target)
        else:
            _convert(snapshot, row, layout, cache_format)
        advance(sum(path.stat().st_size for path in _files(snapshot, row)))
    _index(layout, len(rows))


def _convert(snapshot: Snapshot, row: ShardRow, layout: Layout, cache_format: str) -> None:
    """Write a shard in another format; its samples and their origins are the same."""
    packed = pack(cache_format, snapshot.schema, list(snapshot.mapped(row.number)))
    sidecar, seal = replace(snapshot.sidecar(row.number), **packed.facts), Seal()
    for file in packed.files:
        _write(layout.shard(row.number, file.suffix), seal.passing(file))
    _write(layout.sidecar(row.number), [seal.on(sidecar).to_bytes()])


def _write(path: Path, buffers: Iterable[Buffer]) -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as stream:
        for buffer in buffers:
            stream.write(buffer if isinstance(buffer, bytes) else buffer.data)
        stream.flush()
        os.fsync(stream.fileno())


def _copy_file(source: Path, target: Path) -> None:
    """Copy content and time, durably."""
    shutil.copyfile(source, target)
    shutil.copystat(source, target)
    with target.open("rb") as stream:
        os.fsync(stream.fileno())


def _permit(folder: Path, *, shared: bool) -> None:
    """Say who may read the copy: its owner, or also others, as for any new file."""
    mask = os.umask(0o77)
    os.umask(mask)
    for path in [folder, *folder.rglob("*")]:
        is_folder = path.is_dir()
        own, all_ = (DIRECTORY_MODE, 0o777) if is_folder else (FILE_MODE, 0o666)
        path.chmod(all_ & ~mask if shared else own)


def _index(layout: Layout, shards: int) -> None:
    """Let the copy be a cache: it is indexed from its shards, which are all checked so."""
    used = sum(allocated(path) for path in layout.shards.rglob("*"))
    config = CacheConfig(
        path=layout.root,
        max_bytes=2 * used + INDEX_BYTES + shards * BLOCK_BYTES,  # type: ignore[arg-type]
        eviction="none",
        min_free=0,
        allow_network_filesystem=True,  # nobody else knows of it yet
    )
    with Cache.open(layout.root, config) as cache:
        found = cache.totals().shards
        cache.set_complete(True)
    if found != shards:
        raise CorruptShardError(
            f"{plural(shards - found, 'shard is', 'shards are')} damaged, so nothing was "
            "copied; run: growcache check"
        )


def _files(snapshot: Snapshot, row: ShardRow) -> list[Path]:
    sidecar = snapshot.file(row.number).with_suffix(SIDECAR)
    return [*snapshot.files(row.number), sidecar]
