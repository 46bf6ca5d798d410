"""The service retries an unavailable store, and reports the error with its address and option."""

from __future__ import annotations

import os
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.accidents.commands import command as words_of
from tests.accidents.commands import growcache as command
from tests.accidents.commands import running, write_config, write_objects
from tests.servers import free_port
from tests.servers.guarded import guarded

NOWHERE = "http://127.0.0.1:9"
OPTIONS = {"key": "KEY-1", "secret": "secret-of-1", "client_kwargs": {"region_name": "x"}}


def config_of(folder: Path, source: dict[str, Any]) -> Path:
    return write_config(
        folder / "cache.yaml",
        {"options": {"axis": 0}, **source},
        sampling={"samples_per_object": 8, "shard_samples": 64},
        cache={"max_bytes": "6MB", "min_uses": 0},
    )


def s3(endpoint: str, client: str = "obstore") -> dict[str, Any]:
    options = OPTIONS | {"endpoint_url": endpoint}
    return {"url": "s3://b/*.npy", "client": client, "storage_options": options}


@pytest.mark.slow
@pytest.mark.parametrize("client", ["obstore", pytest.param("fsspec", marks=pytest.mark.slow)])
def test_a_store_that_comes_goes_and_comes_again(tmp_path: Path, client: str) -> None:
    write_objects(tmp_path / "objects", count=300, rows=64)
    port = free_port()
    config = config_of(tmp_path, s3(f"http://127.0.0.1:{port}", client))
    message = f"connection refused by 127.0.0.1:{port} (endpoint_url in source.storage_options)"
    with running(config) as service:
        found = service.wait_for(
            lambda now: message in (now["waiting_for"] or ""), seconds=5 * 5
        )
        assert found["state"] == "waiting"
        service.wait_for(lambda now: message in service.errors, seconds=5 * 10)
        with guarded(tmp_path / "objects", port=port):
            service.wait_for(lambda now: now["drawn"] > 200)
            service.wait_for(lambda now: "the store answers again" in service.errors)
        found = service.wait_for(
            lambda now: message in (now["waiting_for"] or ""), seconds=5 * 5
        )
        assert found["waiting_for"].startswith("the store to answer (")
        before = found["drawn"]
        with guarded(tmp_path / "objects", port=port):
            found = service.wait_for(lambda now: now["drawn"] > before)
            assert found["holes"] == 0


@pytest.mark.slow
def test_a_terminal_is_told_too(tmp_path: Path) -> None:
    """The live view shows warnings above the status."""
    config = config_of(tmp_path, s3(NOWHERE))
    pid, terminal = os.forkpty()
    if pid == 0:
        os.environ["TERM"] = "xterm"
        os.execvp(words_of()[0], words_of("run", config))
    shown = bytearray()
    reader = threading.Thread(target=_read_all, args=(terminal, shown), daemon=True)
    reader.start()
    try:
        deadline = time.monotonic() + 5 * 10
        while b"connection refused by 127.0.0.1:9" not in b" ".join(bytes(shown).split()):
            assert time.monotonic() < deadline, bytes(shown[-2000:])
            time.sleep(0.05)
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        os.close(terminal)


def _read_all(terminal: int, shown: bytearray) -> None:
    while True:
        try:
            shown += os.read(terminal, 65536)
        except OSError:
            return


@pytest.mark.slow
def test_a_mount_that_goes_makes_no_hole(tmp_path: Path) -> None:
    """All files of a directory vanish at once, which says nothing about any one of them."""
    url = write_objects(tmp_path / "mount", count=300, rows=64)
    config = config_of(tmp_path, {"url": url})
    with running(config) as service:
        service.wait_for(lambda now: now["drawn"] > 200)
        (tmp_path / "mount").rename(tmp_path / "away")
        (tmp_path / "mount").mkdir()
        service.wait_for(
            lambda now: (now["waiting_for"] or "").startswith("the store ("), seconds=5 * 5
        )
        (tmp_path / "mount").rmdir()
        (tmp_path / "away").rename(tmp_path / "mount")
        before = service.last["drawn"]
        found = service.wait_for(lambda now: now["drawn"] > before)
        assert found["holes"] == 0


@pytest.mark.slow
def test_a_certificate_that_is_not_trusted_any_more(tmp_path: Path) -> None:
    """The store's new certificate is of another authority, which is then added to the file."""
    trustme = pytest.importorskip("trustme")
    write_objects(tmp_path / "objects", count=300, rows=64)
    first, second = trustme.CA(), trustme.CA()
    trusted = tmp_path / "authorities.pem"
    first.cert_pem.write_to_path(str(trusted))
    port = free_port()
    source = s3(f"https://127.0.0.1:{port}")
    source["storage_options"]["client_kwargs"] = {"verify": str(trusted), "region_name": "x"}
    config = config_of(tmp_path, source)
    with running(config) as service:
        with guarded(tmp_path / "objects", port=port, tls=_tls(first)):
            service.wait_for(lambda now: now["drawn"] > 200)
        with guarded(tmp_path / "objects", port=port, tls=_tls(second)):
            found = service.wait_for(
                lambda now: (now["waiting_for"] or "").startswith("credentials ("),
                seconds=5 * 3,
            )
            assert "certificate is not trusted" in found["waiting_for"]
            second.cert_pem.write_to_path(str(trusted), append=True)
            before = found["drawn"]
            found = service.wait_for(lambda now: now["drawn"] > before)
            assert found["holes"] == 0


def _tls(authority: Any) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    return context


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [(), pytest.param(("-",), marks=pytest.mark.slow)])
def test_init_that_could_not_look_writes_nothing(tmp_path: Path, arguments: Any) -> None:
    message = "connection refused by 127.0.0.1:9 (endpoint_url in source.storage_options)"
    options = ["--yes", "--url", "s3://b/*.npy", "--endpoint-url", NOWHERE]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("AWS_")}
    environment |= {"AWS_ACCESS_KEY_ID": "KEY-1", "AWS_SECRET_ACCESS_KEY": "secret"}
    with ThreadPoolExecutor() as threads:  # each of the two waits for the store
        forced = threads.submit(
            command,
            "init",
            "forced.yaml",
            *options,
            "--force",
            cwd=tmp_path.parent,
            env=environment,
        )
        done = command("init", *arguments, *options, cwd=tmp_path, env=environment)
    assert done.returncode == 1
    assert message in " ".join(done.stderr.split())
    assert not done.stdout
    assert not list(tmp_path.iterdir())
    assert forced.result().returncode == 0
    assert (tmp_path.parent / "forced.yaml").exists()


def test_a_bucket_that_never_was_ends_the_run(tmp_path: Path) -> None:
    """A refused first listing is a mistake in the config, and is reported at once."""
    with guarded(tmp_path) as bucket:
        bucket.refuse(404, "NoSuchBucket")
        config = config_of(tmp_path, s3(bucket.endpoint))
        done = command("run", config)
        assert done.returncode == 2
        address = bucket.endpoint.removeprefix("http://")
        message = " ".join(done.stderr.split())
        assert f"endpoint_url in source.storage_options ({address})" in message
