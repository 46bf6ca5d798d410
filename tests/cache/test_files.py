"""Where a cache may lie, and how its files come to be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from growcache.cache import files
from growcache.cache.cache import Cache
from growcache.cache.directory import adopt
from growcache.cache.files import (
    NETWORK_FILE_SYSTEMS,
    CacheLayout,
    file_system_of,
    whole_blocks,
)
from growcache.cache.formats.encoding import EncodedFile
from growcache.cache.formats.mapped import Buffer
from growcache.cache.incoming import write_incoming
from growcache.errors import CachePathError
from tests.cache.making import config, make


@pytest.mark.mutant(
    30, "growcache.cache.cache:Cache.open", "not config.allow_network_filesystem", "False"
)
@pytest.mark.parametrize("kind", ["nfs4", "fuse.s3fs", "lustre"])
def test_a_network_file_system_is_refused_unless_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(files, "file_system_of", lambda path: kind)
    root = tmp_path / "cache"
    with pytest.raises(CachePathError, match=rf"\({kind}\).*allow_network_filesystem"):
        Cache.open(root, config(root))
    Cache.open(root, config(root, allow_network_filesystem=True)).close()


@pytest.mark.mutant(
    30, "growcache.cache.files:file_system_of", "mount.split()[2] == wanted", "False"
)
def test_the_file_system_is_that_of_the_mount() -> None:
    assert file_system_of(Path("/proc")) == "proc"
    assert file_system_of(Path("/proc")) not in NETWORK_FILE_SYSTEMS


@pytest.mark.mutant(
    10,
    "growcache.cache.incoming:_write_file",
    "os.posix_fallocate(descriptor, 0, size)",
    "pass",
)
def test_all_blocks_are_allocated_before_the_first_byte(tmp_path: Path) -> None:
    """A full disk must show as a clean ENOSPC, before anything is written."""
    layout = CacheLayout(tmp_path / "cache")
    adopt(layout)
    sidecar, (file,) = make(0, 60)
    allocated = []

    def pieces() -> Iterator[Buffer]:
        path = layout.incoming_path("p", 0, file.suffix)
        for piece in file.pieces:
            allocated.append(path.stat().st_blocks * 512)
            yield piece

    watched = EncodedFile(file.suffix, file.nbytes, pieces(), file.guarded)
    write_incoming(layout, "p", sidecar, [watched])
    assert allocated
    assert min(allocated) >= whole_blocks(file.nbytes) > 50_000
