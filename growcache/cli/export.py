"""``growcache export``: copy a cache, and rename the complete copy to its target."""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
import string
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from growcache import __version__
from growcache.cache.cache import Cache
from growcache.cache.directory import adopt
from growcache.cache.files import (
    BLOCK_BYTES,
    SIDECAR,
    CacheLayout,
    allocated,
    fsync_directory,
)
from growcache.cache.formats import CACHE_FORMATS
from growcache.cache.formats.mapped import Buffer
from growcache.cache.incoming import ShardChecksum, encode_shard
from growcache.cache.index.schema import ShardRow
from growcache.cache.purge_list import is_purged, names_purged, read_bytes, read_purge_list
from growcache.cache.side_files import read_identity, write_identity
from growcache.cache.uses import NO_JOB
from growcache.cli.terminal import progress_bar
from growcache.config import CacheConfig
from growcache.errors import (
    CacheError,
    CacheFullError,
    ConfigError,
    CorruptShardError,
    PurgedSampleError,
)
from growcache.humanize import generation_note, in_bytes, plural
from growcache.loading.snapshot import Snapshot
from growcache.loading.waiting import shown_generation
from growcache.modes import DIRECTORY_MODE, FILE_MODE
from growcache.schema import Field, Schema
from growcache.usercode import printable

COPY_INDEX_BYTES = 64 << 20  # a generous size for the copy's index, which is not set aside
COPY_ROW_BYTES = 1024


def export_cache(
    root: Path,
    out: Path,
    *,
    samples: int | None = None,
    cache_format: str | None = None,
    shared: bool = False,
) -> str:
    _refuse_taken(out)
    root = shown_generation(root)
    if cache_format not in (None, *CACHE_FORMATS):
        known = " or ".join(sorted(CACHE_FORMATS))
        raise ConfigError(f"--format: expected {known}, found {cache_format!r}", code="GC105")
    with Snapshot.take(root, job=NO_JOB) as snapshot:
        rows = newest_rows(snapshot.shards, samples)
        total = sum(path.stat().st_size for row in rows for path in _shard_files(snapshot, row))
        _require_room(out.absolute().parent, total + len(rows) * COPY_ROW_BYTES)
        with (
            _folder_renamed_at_end(out) as folder,
            progress_bar("copying shards", total) as advance,
        ):
            wanted = cache_format or snapshot.view.cache_format
            _copy_shards(snapshot, root, rows, folder, wanted, advance)
            _refuse_purged(snapshot, root, rows)
            _index_copy(CacheLayout(folder), len(rows))
            (folder / "manifest.json").write_bytes(_manifest(folder, snapshot, rows, wanted))
            readme = _readme(folder, snapshot, rows, wanted)
            (folder / "README.md").write_text(readme, encoding="utf-8")
            _set_modes(folder, shared=shared)
    samples_text = plural(sum(row.samples for row in rows), "sample")
    return (
        f"Copied {samples_text} in {plural(len(rows), 'shard')} ({in_bytes(total)}) to {out}; "
        f"{out / 'README.md'} says how to read them.{generation_note(root)}"
    )


def newest_rows(rows: Sequence[ShardRow], samples: int | None) -> list[ShardRow]:
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
        raise ConfigError(f"{out} {what}; name a new folder", code="GC106")
    if not out.absolute().parent.is_dir():
        raise ConfigError(
            f"there is no folder {out.absolute().parent}; create it first", code="GC106"
        )


def _require_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CacheFullError(
            f"the copy takes {in_bytes(needed)}, and {in_bytes(free)} are free in {folder}; "
            "name another folder, or lower --samples"
        )


@contextmanager
def _folder_renamed_at_end(out: Path) -> Iterator[Path]:
    made = out.absolute().with_name(f".{out.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        made.mkdir(DIRECTORY_MODE)
        yield made
        fsync_directory(made)
        made.rename(out)  # replaces an empty folder, too
    except OSError as error:
        if isinstance(error, CacheError):
            raise
        said = f"cannot write {out}: {error.strerror}; nothing was copied"
        if error.errno == errno.ENOSPC:
            raise CacheFullError(said) from None
        raise ConfigError(said, code="GC106") from None
    finally:
        shutil.rmtree(made, ignore_errors=True)  # does nothing after the rename


def _copy_shards(
    snapshot: Snapshot,
    root: Path,
    rows: Sequence[ShardRow],
    folder: Path,
    cache_format: str,
    advance: Callable[[int], None],
) -> None:
    layout = CacheLayout(folder)
    adopt(layout)
    identity = read_identity(root)
    assert identity is not None  # it is written before the first shard
    parts = {**identity.parts, "cache.format": cache_format}
    write_identity(folder, replace(identity, parts=parts))
    # A service that fills the copy leaves these objects out, too.
    if purged := read_bytes(CacheLayout(root)):
        _write_durably(layout.purged, [purged])
    for row in rows:
        if cache_format == snapshot.view.cache_format:
            for path in _shard_files(snapshot, row):
                target = layout.shards / path.relative_to(CacheLayout(root).shards)
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, target)
                shutil.copystat(path, target)
                with target.open("rb") as stream:
                    os.fsync(stream.fileno())
        else:
            _convert_shard(snapshot, row, layout, cache_format)
        advance(sum(path.stat().st_size for path in _shard_files(snapshot, row)))


def _refuse_purged(snapshot: Snapshot, root: Path, rows: Sequence[ShardRow]) -> None:
    # The list may have grown meanwhile.
    purges = read_purge_list(CacheLayout(root))
    test = is_purged(CacheLayout(root), purges)
    if purges and any(names_purged(snapshot.sidecar(row.number), test) for row in rows):
        raise PurgedSampleError(
            "some samples belong to purged objects, so nothing was copied; finish the purge "
            f"with: growcache purge {shlex.quote(str(root))}, then export again"
        )


def _convert_shard(
    snapshot: Snapshot, row: ShardRow, layout: CacheLayout, cache_format: str
) -> None:
    packed = encode_shard(cache_format, snapshot.schema, list(snapshot.mapped(row.number)))
    sidecar, seal = replace(snapshot.sidecar(row.number), **packed.facts), ShardChecksum()
    for file in packed.files:
        _write_durably(layout.shard(row.number, file.suffix), seal.passing(file))
    _write_durably(layout.sidecar(row.number), [seal.on(sidecar).to_bytes()])


def _write_durably(path: Path, buffers: Iterable[Buffer]) -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as stream:
        for buffer in buffers:
            stream.write(buffer if isinstance(buffer, bytes) else buffer.data)
        stream.flush()
        os.fsync(stream.fileno())


def _set_modes(folder: Path, *, shared: bool) -> None:
    mask = os.umask(0o77)
    os.umask(mask)
    for path in [folder, *folder.rglob("*")]:
        is_folder = path.is_dir()
        own, all_ = (DIRECTORY_MODE, 0o777) if is_folder else (FILE_MODE, 0o666)
        path.chmod(all_ & ~mask if shared else own)


def _index_copy(layout: CacheLayout, shards: int) -> None:
    used = sum(allocated(path) for path in layout.shards.rglob("*"))
    config = CacheConfig(
        path=layout.root,
        max_bytes=2 * used + COPY_INDEX_BYTES + shards * BLOCK_BYTES,  # type: ignore[arg-type]
        eviction="none",
        min_free=0,
        allow_network_filesystem=True,  # no other process uses it yet
    )
    with Cache.open(layout.root, config) as cache:
        found = cache.totals().shards
        cache.meta.set_complete(True)
    if found != shards:
        raise CorruptShardError(
            f"{plural(shards - found, 'shard is', 'shards are')} damaged, so nothing was "
            "copied; run: growcache check"
        )


def _shard_files(snapshot: Snapshot, row: ShardRow) -> list[Path]:
    sidecar = snapshot.file(row.number).with_suffix(SIDECAR)
    return [*snapshot.files(row.number), sidecar]


RAGGED_NOTE = """\
If the samples of an array differ in size, `NAME.npy` holds all values one after another.
Sample `i` is `NAME[NAME.offsets[i]:NAME.offsets[i + 1]]`. `NAME.shapes` has the shapes of samples
with several dimensions. Text and bytes are stored as `uint8`.
"""


def _manifest(
    folder: Path, snapshot: Snapshot, rows: Sequence[ShardRow], cache_format: str
) -> bytes:
    shards = [
        {
            "number": row.number,
            "samples": row.samples,
            "files": {
                str(path.relative_to(folder)): path.stat().st_size
                for path in sorted(folder.glob(f"shards/{row.number:08d}*/*"))
                + sorted(folder.glob(f"shards/{row.number:08d}.*"))
                if path.is_file()
            },
        }
        for row in rows
    ]
    value = {
        "growcache": __version__,
        "format": cache_format,
        "schema": snapshot.schema.to_json(),
        "samples": sum(row.samples for row in rows),
        "source": _source_urls(folder),
        "shards": shards,
    }
    return orjson.dumps(value, option=orjson.OPT_INDENT_2)


def _readme(
    folder: Path, snapshot: Snapshot, rows: Sequence[ShardRow], cache_format: str
) -> str:
    if cache_format == "tfrecord":
        reading = tfrecord_program(snapshot.schema)
    else:
        ragged = RAGGED_NOTE + "\n" if snapshot.schema.is_ragged else ""
        reading = _filled_template("export_npy.md", ragged=ragged)
    return _filled_template(
        "export_readme.md",
        samples=plural(sum(row.samples for row in rows), "sample"),
        shards=plural(len(rows), "shard"),
        schema="\n".join(f"- `{printable(str(f))}`" for f in snapshot.schema.fields),
        source=", ".join(_source_urls(folder)),
        format=cache_format,
        reading=reading,
    )


def _filled_template(name: str, **values: str) -> str:
    template = Path(__file__).with_name(name).read_text(encoding="utf-8")
    return string.Template(template).substitute(values)


def _source_urls(folder: Path) -> list[Any]:
    identity = read_identity(folder)
    if identity is None:
        return []
    found: list[Any] = []
    for name, value in identity.parts.items():  # numbered if there are several sources
        if name.startswith("source.") and name.endswith(".fields"):
            found += [url for _, url, *_ in value]
        elif name.startswith("source.") and name.endswith(".url"):
            found += value
    return found


def tfrecord_program(schema: Schema) -> str:
    # Names are text literals of the program, so that no part of a name is ever run.
    names = {field: json.dumps(field.name) for field in schema.fields}
    features = [f"    {name}: tf.io.FixedLenFeature([], tf.string)," for name in names.values()]
    fields = [
        f"        {name}: {_decode_expression(field, f'found[{name}]')},"
        for field, name in names.items()
    ]
    return _filled_template(
        "export_tfrecord.md", features="\n".join(features), fields="\n".join(fields)
    )


def _decode_expression(field: Field, found: str) -> str:
    if field.dtype in ("bytes", "str"):
        return found
    name = np.dtype(field.dtype).name
    if name == "bool":
        flat = f"tf.cast(tf.io.decode_raw({found}, tf.uint8), tf.bool)"
    else:
        flat = f"tf.io.decode_raw({found}, tf.{name})"
    open_ = sum(size is None for size in field.shape)
    if open_ > 1:
        return flat  # the feature "NAME/shape" has its shape
    shape = [-1 if size is None else size for size in field.shape]
    return f"tf.reshape({flat}, {shape})"
