"""The store refuses every request: the service waits, makes no hole and does not end."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import growcache.numpy
from tests.accidents.commands import (
    Running,
    edit_config,
    running,
    status,
    write_config,
    write_objects,
)
from tests.accidents.commands import growcache as command
from tests.servers.guarded import GuardedBucket, guarded

SLOW_OBSTORE = pytest.param("obstore", marks=pytest.mark.slow)
SLOW_FSSPEC = pytest.param("fsspec", marks=pytest.mark.slow)
CLIENTS = pytest.mark.parametrize("client", ["obstore", "fsspec"])
REFUSALS = [
    (400, "ExpiredToken"),
    (403, "InvalidAccessKeyId"),
    (403, "RequestTimeTooSkewed"),
    (403, "AccessDenied"),
    (401, ""),
    (404, "NoSuchBucket"),
]


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[GuardedBucket]:
    write_objects(tmp_path / "objects", count=300, rows=64)
    with guarded(tmp_path / "objects") as found:
        yield found


def config_of(
    folder: Path, bucket: GuardedBucket, client: str = "obstore", **source: Any
) -> Path:
    """Return a config whose cache turns over continuously."""
    return write_config(
        folder / "cache.yaml",
        {
            "url": "s3://b/*.npy",
            "client": client,
            "storage_options": bucket.storage_options(),
            "options": {"axis": 0},
            **source,
        },
        sampling={"samples_per_object": 8, "shard_samples": 64},
        cache={"max_bytes": "6MB", "min_uses": 0, "eviction": "fifo"},
    )


def goes_on(service: Running) -> None:
    """Wait until more samples are drawn; check that no hole was made."""
    before = service.wait_for(lambda now: "drawn" in now)["drawn"]
    found = service.wait_for(lambda now: now["drawn"] > before and now["state"] != "waiting")
    assert found["holes"] == 0, found["last_errors"]


def waits_for(service: Running, words: str) -> dict[str, Any]:
    """Return the first status that waits for the given reason."""
    found = service.wait_for(
        lambda now: (now["waiting_for"] or "").startswith(words), seconds=5 * 3
    )
    assert found["state"] == "waiting"
    return found


@pytest.mark.parametrize("client", ["obstore", SLOW_FSSPEC])
def test_a_lapse_makes_no_hole_and_ends_nothing(
    tmp_path: Path, bucket: GuardedBucket, client: str
) -> None:
    config = config_of(tmp_path, bucket, client)
    cache = config.with_suffix("")
    with running(config) as service:
        service.wait_for(lambda now: now["drawn"] > 200)
        for refusal in ((403, "InvalidAccessKeyId"), (403, "AccessDenied"), (401, "")):
            bucket.refuse(*refusal)
            time.sleep(0.2)  # long enough for several visits to be refused
            bucket.open()
            goes_on(service)
        bucket.refuse(400, "ExpiredToken")
        found = waits_for(service, "credentials (")
        assert "expired" in found["waiting_for"]
        assert found["holes"] == 0
        seen = read_an_epoch(cache)
        assert seen > 0
        bucket.open()
        goes_on(service)


def read_an_epoch(cache: Path) -> int:
    """Train for one epoch while the credentials are refused."""
    loader = growcache.numpy.EpochLoader(cache, batch_size=16)
    try:
        return sum(len(next(iter(batch.values()))) for batch in loader)
    finally:
        loader.close()


@pytest.mark.slow
def test_one_key_that_is_refused_is_a_hole(tmp_path: Path, bucket: GuardedBucket) -> None:
    """The store serves the other keys, so this key is a hole and the service continues."""
    bucket.refuse_key("00007.npy", 403, "AccessDenied")
    bucket.refuse_key("00017.npy", 404, "NoSuchKey")
    config = config_of(tmp_path, bucket)
    with running(config, "--set", "sampling.max_skipped=0.5") as service:
        found = service.wait_for(lambda now: now["holes"] >= 2)
        assert service.alive, service.errors
        assert any("00007.npy" in said or "00017.npy" in said for said in found["last_errors"])
        before = found["drawn"]
        service.wait_for(lambda now: now["drawn"] > before)
        assert "credentials" not in service.errors


@pytest.mark.slow
def test_a_refused_key_is_no_sampler_that_hangs(tmp_path: Path, bucket: GuardedBucket) -> None:
    """The key is retried for longer than `timeout_seconds`, and no sampler is restarted."""
    bucket.refuse_key("00007.npy", 403, "AccessDenied")
    config = config_of(tmp_path, bucket)
    sets = ["source.url=s3://b/0000*.npy", "sampling.timeout_seconds=0.5"]
    sets += ["sampling.max_skipped=0.5", "sampling.samples_per_object=8"]
    done = command("run", config, "--until-full", *(w for one in sets for w in ("--set", one)))
    assert done.returncode == 0, done.stderr
    found = status(tmp_path / "cache")
    assert (found["holes"], found["samples"], found["restarts"]) == (8, 9 * 64, 0)


@pytest.mark.parametrize("client", [SLOW_OBSTORE, SLOW_FSSPEC])
def test_new_credentials_in_a_file_are_read(
    tmp_path: Path, bucket: GuardedBucket, client: str
) -> None:
    """`aws sso login` or a cron job renews the credentials while the service runs."""
    file = tmp_path / "credentials"
    write_profile(file, "KEY-1")
    options = {"endpoint_url": bucket.endpoint, "profile": "lab"}
    config = config_of(tmp_path, bucket, client, storage_options=options)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("AWS_")}
    environment |= {"AWS_SHARED_CREDENTIALS_FILE": str(file), "AWS_CONFIG_FILE": os.devnull}
    with running(config, env=environment) as service:
        service.wait_for(lambda now: now["drawn"] > 200)
        bucket.let_in("KEY-2")
        waits_for(service, "credentials (")
        write_profile(file, "KEY-2")
        goes_on(service)


def write_profile(file: Path, key: str) -> None:
    file.write_text(f"[lab]\naws_access_key_id={key}\naws_secret_access_key=s-{key}\n")


@pytest.mark.slow
@pytest.mark.parametrize("client", ["obstore", SLOW_FSSPEC])
def test_new_credentials_in_the_config_are_followed(
    tmp_path: Path, bucket: GuardedBucket, client: str
) -> None:
    config = config_of(tmp_path, bucket, client)
    with running(config) as service:
        service.wait_for(lambda now: now["drawn"] > 200)
        bucket.let_in("KEY-2")
        waits_for(service, "credentials (")
        edit_config(config, source__storage_options=bucket.storage_options("KEY-2"))
        goes_on(service)
        assert service.last["restart_for"] == []
        assert "secret-of" not in service.errors


@pytest.mark.slow
def test_only_a_first_listing_ends_the_run(tmp_path: Path, bucket: GuardedBucket) -> None:
    config = config_of(tmp_path, bucket)
    bucket.refuse(403, "SignatureDoesNotMatch")
    done = command("run", config)
    assert done.returncode == 2
    assert "s3://b refuses the credentials (403 SignatureDoesNotMatch)" in done.stderr
    bucket.open()
    assert command("run", config, "--samples", "100").returncode == 0
    bucket.refuse(403, "SignatureDoesNotMatch")
    with running(config, "--refresh") as service:
        waits_for(service, "credentials (")
        bucket.open()
        goes_on(service)


@pytest.mark.slow
def test_a_run_that_was_refused_is_none_that_failed(
    tmp_path: Path, bucket: GuardedBucket
) -> None:
    """A run that was stopped during a lapse starts again with the right credentials."""
    config = config_of(tmp_path, bucket)
    with running(config) as service:
        service.wait_for(lambda now: now["drawn"] > 100)
        bucket.let_in("KEY-2")
        waits_for(service, "credentials (")
        service.process.terminate()
        assert service.process.wait(30) == 0
    edit_config(config, source__storage_options=bucket.storage_options("KEY-2"))
    with running(config) as service:
        goes_on(service)


@pytest.mark.slow
@CLIENTS
@pytest.mark.parametrize("refusal", REFUSALS)
def test_twenty_seconds(
    tmp_path: Path, bucket: GuardedBucket, client: str, refusal: tuple[int, str]
) -> None:
    config = config_of(tmp_path, bucket, client)
    with running(config) as service:
        service.wait_for(lambda now: now["drawn"] > 200)
        bucket.refuse(*refusal)
        waits_for(service, "the store (" if refusal[0] == 404 else "credentials (")
        asked = bucket.refusals
        time.sleep(20)
        assert bucket.refusals - asked < 60  # samplers back off instead of all retrying at once
        bucket.open()
        since = time.monotonic()
        goes_on(service)
        assert time.monotonic() - since < 5 * 15


@pytest.fixture
def labelled(tmp_path: Path, bucket: GuardedBucket) -> Path:
    """A config with a table of labels."""
    rows = "".join(f"{number:05d}.npy,{number}\n" for number in range(300))
    (tmp_path / "objects" / "labels.csv").write_text(f"name,y\n{rows}")
    table = {"url": "s3://b/labels.csv", "key": "name", "columns": ["y"], "match": "name"}
    return config_of(tmp_path, bucket, labels=table)


def test_a_table_of_labels_that_may_not_be_read_ends_the_first_run(
    labelled: Path, bucket: GuardedBucket
) -> None:
    """Although all objects are listed before the table is refused."""
    bucket.refuse_key("labels.csv", 403, "AccessDenied", seconds=1)
    assert command("run", labelled).returncode == 2


@pytest.mark.slow
def test_a_table_of_labels_is_waited_for_too(labelled: Path, bucket: GuardedBucket) -> None:
    """The table is read at every start, so a start during a lapse finds it refused."""
    assert command("run", labelled, "--samples", "100").returncode == 0
    bucket.refuse(400, "ExpiredToken")
    with running(labelled) as service:
        waits_for(service, "credentials (")
        bucket.open()
        goes_on(service)
