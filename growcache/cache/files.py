"""The names in a cache directory, and files that are written completely or not at all."""

from __future__ import annotations

import errno
import os
import re
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import google_crc32c
import orjson

from growcache.errors import CacheFullError, CacheMissingError, CachePathError
from growcache.modes import FILE_MODE, ONE_USER_OR_GROUP, share_if_folder_is

_FULL_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT}


def is_full_disk(error: OSError) -> bool:
    return error.errno in _FULL_DISK_ERRORS


@contextmanager
def naming_full_disk(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if not is_full_disk(error):
            raise
        raise CacheFullError(
            f"no room on the disk for {what}; free some space, or lower cache.max_bytes"
        ) from error


CHECKSUM = "crc32c"


def checksummed_json(values: dict[str, Any], *, compact: bool = False) -> bytes:
    sealed = {CHECKSUM: _checksum(values), **values}
    spaces = 0 if compact else orjson.OPT_INDENT_2
    return orjson.dumps(sealed, option=spaces | orjson.OPT_SORT_KEYS)


def verified_json(data: bytes) -> dict[str, Any]:
    """Return the values of `checksummed_json`. May raise ValueError.

    >>> verified_json(checksummed_json({"issued": 7}))
    {'issued': 7}
    """
    values = orjson.loads(data)
    if not isinstance(values, dict):
        raise ValueError("expected a JSON object")
    if values.pop(CHECKSUM, None) != _checksum(values):
        raise ValueError("its checksum is wrong")
    return values


def _checksum(values: dict[str, Any]) -> str:
    return f"{google_crc32c.value(orjson.dumps(values, option=orjson.OPT_SORT_KEYS)):08x}"


BLOCK_BYTES = 4096

# flock and SQLite's WAL are not reliable on these (WAL needs shared memory). FUSE file systems
# are refused by name, because some (fuseblk, fuse.ext4) are local disks.
NETWORK_FILE_SYSTEMS = frozenset(
    {"afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4"}
    | {"orangefs", "pvfs2", "smb3", "smbfs", "fuse.blobfuse", "fuse.blobfuse2", "fuse.ceph"}
    | {"fuse.gcsfuse", "fuse.geesefs", "fuse.glusterfs", "fuse.goofys", "fuse.juicefs"}
    | {"fuse.mount-s3", "fuse.mountpoint-s3", "fuse.rclone", "fuse.s3fs", "fuse.sshfs"}
)

# The files of a shard, by the ends of their names: the samples and their description. The
# samples are a file of records, with an index of its values if their sizes differ, or a
# directory of arrays.
RECORDS = ".tfrecord"
OFFSETS = ".offsets.npy"
ARRAYS = ".npy"
SIDECAR = ".json"
SHARD_PARTS = (RECORDS, OFFSETS, ARRAYS, SIDECAR)

INDEX = "index.sqlite"
MARKER = "growcache.json"  # marks a folder as a cache, and has its layout's version
LAYOUT_VERSION = 2  # of a cache with several generations; with one it is 1
PLAIN_LAYOUT_VERSION = 1

# A link to the directory itself, which exists once there is a second generation.
FIRST_GENERATION = "generation-0"
_GENERATION = re.compile(r"generation-([0-9]{1,9})")


def generation_in(path: Path) -> int | None:
    """Return the generation that a path names, or None.

    >>> generation_in(Path("cache/generation-3")), generation_in(Path("cache"))
    (3, None)
    """
    match = _GENERATION.fullmatch(path.name)
    return None if match is None else int(match[1])


def generation_path(root: Path, number: int) -> Path:
    return root / f"generation-{number}"


def generation_numbers(root: Path) -> list[int]:
    """Return the generations in a directory, oldest first. A plain cache has only the first."""
    if not os.path.lexists(root / FIRST_GENERATION):
        return [0]
    found = [0] if (root / INDEX).exists() else []
    with os.scandir(root) as entries:
        numbers = [generation_in(Path(entry.name)) for entry in entries]
    found += [n for n in numbers if n and (generation_path(root, n) / MARKER).exists()]
    return sorted(found) or [0]


def generation_paths(root: Path) -> list[Path]:
    """Return the path of each generation, oldest first.

    A plain cache, or a single generation, has only its own.
    """
    if generation_in(root) is not None or not os.path.lexists(root / FIRST_GENERATION):
        return [root]
    return [generation_path(root, number) for number in generation_numbers(root)]


def path_of_generation(root: Path, number: int) -> Path:
    """Return the path of a generation in a directory.

    ``root`` may also be a plain cache, or that generation itself.
    """
    several = generation_in(root) is None and os.path.lexists(root / FIRST_GENERATION)
    return generation_path(root, number) if several else root


def directory_of(root: Path) -> Path:
    """Return the cache directory of a path, which may be a generation in it."""
    return root if generation_in(root) is None else root.parent


def _resolved_root(path: Path) -> Path:
    if generation_in(path) is not None or not os.path.lexists(path / FIRST_GENERATION):
        return path
    paths = [generation_path(path, number) for number in generation_numbers(path)]
    # A new generation has a marker before it has an index, which readers need.
    return next((p for p in reversed(paths) if (p / INDEX).exists()), paths[-1])


class _LayoutPath:
    """The path of one name, made at its first use, because making all took a tenth of a snapshot."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __set_name__(self, owner: type[CacheLayout], attribute: str) -> None:
        self._attribute = attribute

    def __get__(self, layout: CacheLayout, owner: type[CacheLayout]) -> Path:
        path = layout.root / self._name
        vars(layout)[self._attribute] = path  # next time it is found before this descriptor
        return path


class CacheLayout:
    marker = _LayoutPath(MARKER)
    shards = _LayoutPath("shards")  # live and retired, each with its sidecar
    incoming = _LayoutPath("incoming")  # shards being written or removed; swept at every start
    leases = _LayoutPath("leases")  # one file per snapshot that a reader holds
    index = _LayoutPath(INDEX)
    catalog = _LayoutPath("catalog.bin")
    supervisor_lock = _LayoutPath("supervisor.lock")
    samplers_lock = _LayoutPath("samplers.lock")
    identity = _LayoutPath("identity.json")
    issued = _LayoutPath("issued")
    editions = _LayoutPath("editions.json")
    deferrals = _LayoutPath("deferrals.json")
    purged = _LayoutPath("purged")  # hashes of keys; it outlives the contents of the cache
    ballast = _LayoutPath("ballast")
    status = _LayoutPath("status.json")
    metrics = _LayoutPath("metrics.json")
    clearing = _LayoutPath("clearing")

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = _resolved_root(Path(root).absolute())

    @property
    def directory(self) -> Path:
        """The path that users know, if ``root`` is one of its generations."""
        parent = directory_of(self.root)
        return parent if os.path.lexists(parent / FIRST_GENERATION) else self.root

    @property
    def folders(self) -> tuple[Path, ...]:
        return (self.shards, self.incoming, self.leases)

    @property
    def own_files(self) -> list[Path]:
        names = [
            name for name, value in vars(CacheLayout).items() if isinstance(value, _LayoutPath)
        ]
        files = [
            path for path in (getattr(self, name) for name in names) if path not in self.folders
        ]
        ends = ("-wal", "-shm", "-journal")
        return [*files, *(self.index.with_name(self.index.name + end) for end in ends)]

    def shard(self, number: int, extension: str = RECORDS) -> Path:
        return self.shards / f"{number:08d}{extension}"

    def sidecar(self, number: int) -> Path:
        return self.shards / f"{number:08d}{SIDECAR}"

    def incoming_path(self, permit: str, number: int, suffix: str) -> Path:
        return self.incoming / f"{permit}-{number:08d}{suffix}"

    def require(self) -> None:
        """Raise CacheMissingError without a cache, and CachePathError for one of a later version."""
        try:
            version = read_marker(self)
            there, known = _exists(self.index), _exists(self.identity)
        except PermissionError:
            raise CachePathError(permission_message(self.root), code="GC406") from None
        except OSError as error:
            raise unusable_path_error(self.root, error) from error
        if version is not None and version > LAYOUT_VERSION:
            raise newer_layout_error(self, version)
        if there:
            return
        if known:
            raise CacheMissingError(
                f"the index of the cache at {self.root} is missing; the next growcache run "
                f"CONFIG rebuilds it, and so does: growcache check {self.root} --repair"
            )
        raise CacheMissingError(
            f"no cache at {self.directory}; fill one with: growcache run CONFIG"
        )


def permission_message(path: Path) -> str:
    try:
        owner = f"owned by uid {path.stat().st_uid}"
    except PermissionError:
        owner = "in another user's folder"
    return (
        f"no permission to look into {path}: it is {owner}, and this process runs as uid "
        f"{os.geteuid()}; " + ONE_USER_OR_GROUP
    )


def _exists(path: Path) -> bool:
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def read_marker(layout: CacheLayout) -> int | None:
    try:
        data = layout.marker.read_bytes()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    try:
        return int(verified_json(data)["layout"])
    except (ValueError, TypeError, KeyError):
        return None


def newer_layout_error(layout: CacheLayout, version: int) -> CachePathError:
    return CachePathError(
        f"the cache at {layout.root} was made by a newer growcache (layout {version}, this one "
        f"knows {LAYOUT_VERSION}); upgrade growcache, or choose another cache.path",
        code="GC408",
    )


def unusable_path_error(path: Path, error: OSError) -> CachePathError:
    if error.errno == errno.ENAMETOOLONG:
        size, shown = len(os.fsencode(path)), str(path)
        return CachePathError(
            f"the path of the cache is too long for this system ({size} bytes: "
            f"{shown[:40]}…{shown[-20:]}); choose a shorter cache.path"
        )
    return CachePathError(
        f"cannot use {path} for a cache: {error.strerror}; choose another cache.path"
    )


def shard_number(path: Path) -> int | None:
    return shard_number_in(path.name)


def shard_number_in(name: str) -> int | None:
    stem = name.partition(".")[0]
    return int(stem) if stem.isascii() and stem.isdigit() else None


def allocated(path: Path) -> int:
    """Return the bytes of the file's blocks on disk, or 0 without the file."""
    try:
        return path.lstat().st_blocks * 512
    except FileNotFoundError:
        return 0


def shard_paths(layout: CacheLayout, number: int) -> list[Path]:
    """Return the paths that a shard may have, in any format, samples first."""
    return [layout.shards / name for name in shard_names(number)]


def shard_names(number: int) -> list[str]:
    """Return the names of these paths, which is cheaper for all shards of a cache."""
    return [f"{number:08d}{part}" for part in SHARD_PARTS]


def allocated_tree(root: Path) -> int:
    return allocated(root) + sum(_tree(root))


def _tree(directory: Path) -> Iterator[int]:
    try:
        entries = list(os.scandir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return
    except PermissionError:  # for root's lost+found, at the top of a file system
        return
    for entry in entries:
        try:
            yield entry.stat(follow_symlinks=False).st_blocks * 512
        except FileNotFoundError:
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _tree(Path(entry.path))


def whole_blocks(size: int) -> int:
    """Return a file's size rounded up to whole blocks.

    >>> whole_blocks(0), whole_blocks(1), whole_blocks(4097)
    (0, 4096, 8192)
    """
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


def fsync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Replace the file. Readers see the old content or the new one."""
    with _temporary_file(path) as temporary:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE)
        try:
            share_if_folder_is(descriptor, path.parent)
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.rename(path)
    if durable:
        fsync_directory(path.parent)


def overwrite_in_place(path: Path, versions: Iterable[bytes]) -> None:
    """Write the first version that fits into the file's blocks, or none. For a full disk.

    A concurrent reader may see half of it. Blanks at the end are valid JSON.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY)
    except FileNotFoundError:
        return
    try:
        found = os.fstat(descriptor)
        capacity = max(found.st_size, found.st_blocks * 512)
        if data := next((data for data in versions if len(data) <= capacity), b""):
            os.pwrite(descriptor, data.ljust(found.st_size), 0)
    except OSError as error:  # from file systems that never write in place
        if not is_full_disk(error):
            raise
    finally:
        os.close(descriptor)


@contextmanager
def _temporary_file(path: Path) -> Iterator[Path]:
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        yield temporary
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def file_system_of(path: Path) -> str:
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "unknown"
    for line in lines:
        mount, _, source = line.partition(" - ")
        if mount.split()[2] == wanted:
            return source.split()[0]
    return "unknown"


def refuse_network(path: Path) -> None:
    """Raise CachePathError for a network file system, because flock and SQLite fail there."""
    try:
        kind = file_system_of(next(p for p in (path, *path.parents) if _exists(p)))
    except OSError as error:
        raise unusable_path_error(path, error) from error
    if kind in NETWORK_FILE_SYSTEMS:
        raise CachePathError(
            f"{path} is on a network file system ({kind}), where locks are not reliable; "
            "choose a local disk, or set cache.allow_network_filesystem: true at your own risk",
            code="GC407",
        )
