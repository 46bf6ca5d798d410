"""What is kept of a command line: lock files, leases and the status are read by others."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from growcache.cache.directory import adopt
from growcache.cache.files import CacheLayout
from growcache.cache.locks import FileLock, readable_command, this_process
from growcache.cache.reader_lease import Lease

SECRET = "wJalr/XUtn+FEMI@K7"


@pytest.mark.parametrize(
    ("argument", "kept"),
    [
        (f"source.storage_options.secret={SECRET}", "source.storage_options.secret=HIDDEN"),
        (
            f"--set=source.storage_options.key={SECRET}",
            "--set=source.storage_options.key=HIDDEN",
        ),
        (f"source.storage_options={{secret: {SECRET}}}", "source.storage_options=HIDDEN"),
        (f"--set=source={{storage_options: {{a: {SECRET}=}}}}", "--set=source=HIDDEN"),
        (f"source.storage_options.a.b={SECRET}=x", "source.storage_options.a.b=HIDDEN"),
        (f"s3://key:{SECRET}@bucket/a.npy", "s3://HIDDEN@bucket/a.npy"),
        (f"source.url=sftp://me:{SECRET}@host/x", "source.url=sftp://HIDDEN@host/x"),
        ("sftp://token@host/x", "sftp://HIDDEN@host/x"),
        (
            f"source.url=https://h/a?v=1&X-Amz-Signature={SECRET}",
            "source.url=https://h/a?v=1&X-Amz-Signature=HIDDEN",
        ),
        (f"az://c/a?sv=2&sig={SECRET}", "az://c/a?sv=2&sig=HIDDEN"),
    ],
)
def test_a_secret_is_not_kept_and_the_rest_is(argument: str, kept: str) -> None:
    said = readable_command(["/usr/bin/growcache", "run", argument, "--until-full"])
    assert SECRET not in said
    assert said.replace("'", "") == f"growcache run {kept} --until-full"


@pytest.mark.parametrize(
    "argument",
    [
        "cache.max_bytes=5GB",
        "s3://bucket/sub-*/run?.npy",
        "http://127.0.0.1:9000/a/b.npy",
        "https://host/mail@home/x?page=2",
        "me@host",
        "/data/storage_options/x.yaml",
        "key=value",
    ],
)
def test_what_is_no_secret_is_left_as_it_is(argument: str) -> None:
    assert readable_command(["x", argument]).replace("'", "") == f"x {argument}"


def test_no_file_of_the_cache_holds_the_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--set", f"source.storage_options.secret={SECRET}", f"s3://k:{SECRET}@b/x"]
    monkeypatch.setattr(sys, "argv", ["/usr/bin/growcache", "run", *arguments])
    layout = CacheLayout(tmp_path)
    adopt(layout)
    with FileLock.acquire(layout.supervisor_lock):
        lease = Lease.create(tmp_path, "default", [1])
        written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
        lease.close()
    assert len(written) == 3
    assert sum(b"growcache run --set" in data for data in written) == 2, "not the marker"
    assert all(SECRET.encode() not in data for data in written)
    assert SECRET not in this_process()["command"]
