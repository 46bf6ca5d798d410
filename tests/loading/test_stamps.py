"""A stamp is another one as soon as a file may be another one."""

from __future__ import annotations

import os
from pathlib import Path

from growcache.loading.maps import FileIdentity, file_identity
from tests.sampling.services import wait_until


def settled(*paths: Path) -> FileIdentity:
    wait_until(lambda: file_identity(paths) is not None, 5, every=0.002)
    found = file_identity(paths)
    assert found is not None
    return found


def test_what_is_written_to_replaced_or_gone_is_seen(tmp_path: Path) -> None:
    file, other = tmp_path / "a", tmp_path / "b"
    file.write_bytes(b"12")
    assert file_identity([file]) is None  # it might change once more within the same tick
    found = settled(file)
    assert settled(file) == found
    file.write_bytes(b"12")
    assert file_identity([file]) is None
    again = settled(file)
    assert again != found
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    other.write_bytes(b"12")
    os.utime(other, ns=times)
    other.rename(file)
    assert settled(file) not in (found, again)
    other.write_bytes(b"3")
    assert len(settled(file, other)) == 2
    other.unlink()
    assert file_identity([file, other]) is None
    assert file_identity([]) is None
