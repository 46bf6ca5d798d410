"""Purge beside real services and readers: what was purged is gone, stays away, and nothing else changes."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from growcache.cache.check import check
from growcache.cache.directory import adopt
from growcache.cache.files import CacheLayout
from growcache.cache.index.reader import read_index
from growcache.cache.purge_list import PurgedObject, append_to_list, key_hash, read_purge_list
from growcache.cache.reader_lease import Lease
from growcache.cache.shard_refetches import refetch_outcomes
from growcache.cache.sidecar import Sidecar
from growcache.cli.cli import main
from growcache.cli.export import export_cache
from growcache.cli.peek import sample_at
from growcache.errors import CacheError, PurgedSampleError
from growcache.loading.snapshot import Snapshot
from growcache.numpy import EpochLoader
from tests.sampling.services import (
    drawn,
    kill,
    make_source,
    run,
    service,
    status,
    wait_until,
    write_config,
)

OBJECTS = 60
PURGED = (3, 17, 44)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_source(tmp_path_factory.mktemp("remote") / "objects", OBJECTS)


def keys_of(url: str, numbers: tuple[int, ...] = PURGED) -> list[str]:
    return [f"{Path(url).parent}/{number:05d}.npy" for number in numbers]


def record(cache: Path, keys: list[str]) -> None:
    append_to_list(CacheLayout(cache), [PurgedObject(key_hash(key), 1) for key in keys])


def on_disk(cache: Path) -> set[str]:
    found: set[str] = set()
    for path in (cache / "shards").glob("*.json"):
        found.update(Sidecar.from_bytes(path.read_bytes()).origins.keys)
    return found


def delivered(cache: Path) -> set[int]:
    with Snapshot.take(cache) as snapshot:
        return {int(snapshot[i]["x"].flat[0]) for i in range(len(snapshot))}


def files(cache: Path) -> dict[str, bytes]:
    shards = cache / "shards"
    found = sorted(path for path in shards.rglob("*") if path.is_file())
    return {str(path.relative_to(shards)): path.read_bytes() for path in found}


def is_complete(cache: Path) -> bool:
    try:
        return status(cache).state == "complete"
    except CacheError:
        return False


Said = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def purge(capfdbinary: pytest.CaptureFixture[bytes]) -> Said:
    def command(cache: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
        capfdbinary.readouterr()
        code = main(["purge", str(cache), *arguments, "--json"])
        return code, json.loads(capfdbinary.readouterr().out)

    return command


WINDOWS = {"options": {"window": 4}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cache_format", "source"),
    [
        ("tfrecord", WINDOWS),
        pytest.param("tfrecord", {}, marks=pytest.mark.slow),
        pytest.param("npy", {}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.mutant(
    31,
    "growcache.sampling.permits:PermitIssuer._grant",
    "self._purged_places(visits)",
    "()",
)
def test_a_purged_cache_is_one_that_never_drew_the_objects(
    tmp_path: Path, url: str, purge: Said, cache_format: str, source: dict[str, Any]
) -> None:
    """Also on another node, which has the same list: byte for byte, sidecars included."""
    changed = {"cache": {"format": cache_format}, "source": {"url": url, **source}}
    filled = write_config(tmp_path / "a.yaml", url, **changed)
    assert run(filled, "--until-full")[0] == 0
    samples = status(tmp_path / "a").samples
    code, said = purge(tmp_path / "a", *keys_of(url), "nobody")
    per_object = samples // OBJECTS
    assert (code, said["keys"], said["listed"], said["held"]) == (0, 4, 3, [])
    assert said["samples"] == 3 * per_object
    assert status(tmp_path / "a").samples == samples - 3 * per_object

    other = write_config(tmp_path / "b.yaml", url, **changed)
    adopt(CacheLayout(tmp_path / "b"))
    record(tmp_path / "b", keys_of(url))
    assert run(other, "--until-full")[0] == 0
    assert files(tmp_path / "a") == files(tmp_path / "b")
    assert check(tmp_path / "a") == check(tmp_path / "b") == []
    found = status(tmp_path / "b")
    assert (found.complete, found.coverage, found.holes) == (True, 1.0, 0)
    assert run(filled, "--until-full")[0] == 0  # it draws nothing of them again
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_a_service_purges_while_a_reader_holds_on(
    tmp_path: Path, url: str, purge: Said
) -> None:
    config, cache = write_config(tmp_path / "c.yaml", url), tmp_path / "c"
    with service(config):
        wait_until(lambda: is_complete(cache))
        with Snapshot.take(cache, job="train") as snapshot:
            before = [snapshot[i]["x"] for i in range(len(snapshot))]
            code, said = purge(cache, *keys_of(url))
            assert code == 1
            assert [holder["job"] for holder in said["holders"]] == ["train"]
            assert said["held"] == said["holders"][0]["shards"]
            assert delivered(cache).isdisjoint(PURGED)
            wait_until(lambda: status(cache).purging == len(said["held"]))
            assert all(
                np.array_equal(snapshot[i]["x"], values) for i, values in enumerate(before)
            )
            waited = threading.Thread(target=main, args=(["purge", str(cache), "--wait"],))
            waited.start()
        waited.join(300)
        assert not waited.is_alive()
        assert delivered(cache) == {*range(OBJECTS)} - {*PURGED}
        assert on_disk(cache).isdisjoint(keys_of(url))
        wait_until(lambda: status(cache).purging == 0)
        assert status(cache).state == "complete"
    assert check(cache) == []


@pytest.mark.mutant(
    31,
    "growcache.sampling.dispatch:Dispatcher.written",
    "issued.permit.purged != self._purged_places(issued.permit.visits)",
    "False",
)
def test_what_is_being_drawn_meanwhile_is_drawn_without(
    tmp_path: Path, url: str, purge: Said
) -> None:
    """Every object is purged but one, while permits for them are out."""
    config, cache = (
        write_config(
            tmp_path / "c.yaml",
            url,
            source={"url": url},
            sampling={"max_bytes_per_second": 60_000, "concurrency": 1},
        ),
        tmp_path / "c",
    )
    with service(config):
        wait_until(lambda: (cache / "index.sqlite").exists() and read_index(cache).shards)
        code, _ = purge(cache, *keys_of(url, tuple(range(1, OBJECTS))))
        assert code == 0
        wait_until(lambda: is_complete(cache))
        assert delivered(cache) == {0}
    assert on_disk(cache) == {*keys_of(url, (0,))}
    assert check(cache) == []


@pytest.mark.slow
def test_a_killed_service_goes_on_with_the_list(tmp_path: Path, url: str, purge: Said) -> None:
    config, cache = write_config(tmp_path / "c.yaml", url), tmp_path / "c"
    with service(config) as running:
        wait_until(lambda: is_complete(cache))
        with Snapshot.take(cache):
            assert purge(cache, *keys_of(url))[0] == 1
            kill(running.pid)
            running.wait()
            record(cache, keys_of(url, (5,)))
            assert purge(cache)[0] == 1  # by itself
    assert run(config, "--until-full")[0] == 0
    assert delivered(cache) == {*range(OBJECTS)} - {*PURGED, 5}
    assert on_disk(cache).isdisjoint(keys_of(url, (*PURGED, 5)))


def open_loader(cache: Path) -> EpochLoader:
    return EpochLoader(cache, batch_size=4, min_samples=1, seed=1)


def rest_of(cache: Path, state: dict[str, Any], missing: Any) -> set[int]:
    with open_loader(cache) as loader:
        loader.load_state_dict(state, missing=missing)
        return {int(x.flat[0]) for batch in loader for x in batch["x"]}


@pytest.mark.slow
def test_a_checkpoint_resumes_without_purged_samples(
    tmp_path: Path, url: str, purge: Said
) -> None:
    config, cache = write_config(tmp_path / "c.yaml", url), tmp_path / "c"
    assert run(config, "--until-full")[0] == 0
    with open_loader(cache) as loader:
        next(iter(loader))
        state = loader.state_dict()
    old = {row.number: row.digest for row in read_index(cache).shards}
    assert purge(cache, *keys_of(url))[0] == 0
    new = {row.number: row.digest for row in read_index(cache).shards}
    with service(config):
        wait_until(lambda: is_complete(cache))
        for missing in ("refetch", "error"):
            with pytest.raises(CacheError):
                rest_of(cache, state, missing)
        seen = rest_of(cache, state, "substitute")
        assert seen
        assert seen.isdisjoint(PURGED)
        wishes = {n: digest for n, digest in old.items() if new[n] != digest}
        with Lease.create(cache, "job", sorted(wishes), wishes=wishes):
            wait_until(
                lambda: all(
                    one.state == "refused" and "purged" in one.reason
                    for one in refetch_outcomes(read_index(cache), wishes).values()
                )
            )


def place_of(cache: Path, key: str) -> str:
    for path in (cache / "shards").glob("*.json"):
        sidecar = Sidecar.from_bytes(path.read_bytes())
        for i in range(sidecar.samples):
            if sidecar.origin(i).key == key:
                return f"{sidecar.number}:{i}"
    raise AssertionError(f"no sample of {key}")


def test_what_is_recorded_is_honoured_at_once(tmp_path: Path, url: str) -> None:
    """Before a service, or the command, has come to it."""
    config, cache = write_config(tmp_path / "c.yaml", url), tmp_path / "c"
    assert run(config, "--until-full")[0] == 0
    place = place_of(cache, keys_of(url)[0])
    assert main(["peek", str(cache), "--sample", place, "--refetch"]) == 0
    record(cache, keys_of(url))
    with pytest.raises(PurgedSampleError):
        sample_at(cache, place)
    assert main(["peek", str(cache), "--sample", place, "--refetch"]) == 1
    with pytest.raises(PurgedSampleError, match="nothing was copied"):
        export_cache(cache, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    assert any("growcache purge" in finding.message for finding in check(cache))

    assert main(["purge", str(cache)]) == 0
    export_cache(cache, tmp_path / "copy", cache_format="npy")
    assert delivered(tmp_path / "copy") == {*range(OBJECTS)} - {*PURGED}
    copied = read_purge_list(CacheLayout(tmp_path / "copy"))
    assert copied.hashes == {*map(key_hash, keys_of(url))}
    assert main(["clear", str(cache), "--yes"]) == 0
    assert run(config, "--until-full")[0] == 0
    assert delivered(cache) == {*range(OBJECTS)} - {*PURGED}


@contextmanager
def held_list(keys: list[str]) -> Iterator[tuple[str, threading.Event]]:
    """Yield the URL of a purge list that comes when the event is set."""
    may_come, body = threading.Event(), "\n".join(keys).encode()

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()

        def do_GET(self) -> None:
            may_come.wait(300)
            self.do_HEAD()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/purged", may_come
    finally:
        may_come.set()
        server.shutdown()
        thread.join()
        server.server_close()


def waits_for(cache: Path) -> str | None:
    try:
        return status(cache).waiting_for
    except CacheError:
        return None


@pytest.mark.mutant(
    31,
    "growcache.sampling.supervisor:Supervisor._identify",
    "if self._awaits_purges:\n"
    "    self._search.waiting_for = 'the purge list (source.purged)'\n"
    "    return",
    "",
)
def test_nothing_is_drawn_before_the_shared_list_was_read(tmp_path: Path, url: str) -> None:
    with held_list(keys_of(url)) as (purged, may_come):
        sampling = {"timeout_seconds": 100}
        config = write_config(
            tmp_path / "c.yaml", url, source={"url": url, "purged": purged}, sampling=sampling
        )
        cache = tmp_path / "c"
        with service(config, "--until-full") as process:
            wait_until(lambda: waits_for(cache) == "the purge list (source.purged)")
            assert not drawn(cache)
            may_come.set()
            _, errors = process.communicate(timeout=300)
            assert (process.returncode, errors) == (0, "")
    assert delivered(cache) == {*range(OBJECTS)} - {*PURGED}


@pytest.mark.slow
def test_machines_share_a_list(tmp_path: Path, url: str, purge: Said) -> None:
    """It is read before anything is drawn; what is added later is purged, too."""
    shared = tmp_path / "shared"
    source = {"url": url, "purged": str(shared)}
    nodes = [
        write_config(
            tmp_path / f"{node}.yaml", url, source=source, sampling={"node": node, "nodes": 2}
        )
        for node in range(2)
    ]
    shared.write_text("\n".join(keys_of(url)))
    for node in nodes:
        assert run(node, "--until-full", seconds=250)[0] == 0
    caches = [node.with_suffix("") for node in nodes]
    assert set().union(*map(delivered, caches)) == {*range(OBJECTS)} - {*PURGED}
    assert not delivered(caches[0]) & delivered(caches[1])

    purge(caches[0], *keys_of(url, (5, 6)))
    shared.write_bytes((caches[0] / "purged").read_bytes())
    with service(nodes[1]):
        wait_until(lambda: delivered(caches[1]).isdisjoint({5, 6}))
        assert purge(caches[1])[0] == 0
    assert set().union(*map(delivered, caches)) == {*range(OBJECTS)} - {*PURGED, 5, 6}
    assert [*map(errors_in, caches)] == [[], []]

    shared.unlink()
    code, errors = run(nodes[1], "--until-full", seconds=250)
    assert code
    assert "source.purged" in errors


@pytest.mark.slow
def test_a_stopped_service_goes_on_with_the_list(
    tmp_path: Path, url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    config, cache = write_config(tmp_path / "c.yaml", url), tmp_path / "c"
    with service(config) as running:
        wait_until(lambda: is_complete(cache))
        running.send_signal(signal.SIGSTOP)
        capfd.readouterr()
        assert main(["purge", str(cache), "--wait", *keys_of(url)]) == 1
        said = " ".join(capfd.readouterr().err.split())
        assert "the objects are recorded, and are purged once the service continues" in said
        assert f"kill -CONT {running.pid}" in said
        running.send_signal(signal.SIGCONT)
        wait_until(lambda: delivered(cache) == {*range(OBJECTS)} - {*PURGED})
        assert main(["purge", str(cache)]) == 0


@pytest.mark.slow
def test_a_service_purges_both_generations(tmp_path: Path, url: str, purge: Said) -> None:
    config, cache = write_config(tmp_path / "c.yaml", url), tmp_path / "c"
    assert run(config, "--until-full")[0] == 0
    old, new = CacheLayout(cache / "generation-0"), CacheLayout(cache / "generation-1")
    with (
        Snapshot.take(cache, job="train"),
        service(config, "--set", "sampling.seed=2", "--replace"),
    ):
        wait_until(lambda: new.marker.exists() and drawn(new.root) > 0)
        code, said = purge(cache, *keys_of(url))
        assert (code, said["generations"], said["recorded"]) == (1, 2, len(PURGED))
        assert {holder["job"] for holder in said["holders"]} == {"train"}
        assert read_purge_list(old).hashes == read_purge_list(new).hashes
        wait_until(lambda: delivered(new.root) == {*range(OBJECTS)} - {*PURGED})
    with service(config, "--set", "sampling.seed=2"):
        assert purge(cache, "--wait")[0] == 0
        assert on_disk(cache).isdisjoint(keys_of(url))
        assert on_disk(new.root).isdisjoint(keys_of(url))


@pytest.mark.slow
def test_an_object_of_any_field_is_named(tmp_path: Path, purge: Said) -> None:
    (tmp_path / "in").mkdir()
    for n in range(12):
        for name in "xy":
            np.save(tmp_path / "in" / f"{name}_{n}.npy", np.full(8, n, np.float32))
    fields = {name: f"{tmp_path}/in/{name}_{{k}}.npy" for name in "xy"}
    config = write_config(tmp_path / "c.yaml", "", sampling={"shard_samples": 4})
    values = yaml.safe_load(config.read_text())
    values["source"] = {"fields": fields}
    config.write_text(yaml.safe_dump(values))
    assert run(config, "--until-full")[0] == 0
    code, said = purge(tmp_path / "c", f"{tmp_path}/in/y_7.npy", f"{tmp_path}/in/x_2.npy")
    assert (code, said["samples"], said["listed"]) == (0, 2, 2)
    assert delivered(tmp_path / "c") == {*range(12)} - {2, 7}
    assert main(["clear", str(tmp_path / "c"), "--yes"]) == 0
    assert run(config, "--until-full")[0] == 0  # no visit brings them
    assert delivered(tmp_path / "c") == {*range(12)} - {2, 7}


def test_no_file_spells_a_purged_key(tmp_path: Path, purge: Said) -> None:
    """But for the listing, which is packed: holes name keys in the index, errors in the status."""
    url = make_source(tmp_path / "objects", 20)
    bad = tmp_path / "objects" / "secret-name.npy"
    bad.write_bytes(b"no array")
    config = write_config(tmp_path / "c.yaml", url, sampling={"max_skipped": 0.5})
    cache = tmp_path / "c"
    assert run(config, "--until-full")[0] == 0
    assert spelling(cache, "secret-name") > {"index.sqlite", "status.json"}
    assert purge(cache, str(bad))[0] == 0
    assert status(cache).holes == 0
    assert spelling(cache, "secret-name") == set()


def errors_in(cache: Path) -> list[str]:
    return [one.message for one in check(cache) if one.severity == "error"]


def spelling(cache: Path, text: str) -> set[str]:
    paths = (path for path in cache.rglob("*") if path.is_file())
    return {path.name for path in paths if text.encode() in path.read_bytes()}


def test_a_new_cache_looks_at_no_purged_object(tmp_path: Path) -> None:
    """Not for the schema either: these would stop the service."""
    url = make_source(tmp_path / "objects", 20)
    for number in range(18):
        (tmp_path / "objects" / f"{number:05d}.npy").write_bytes(b"no array")
    (tmp_path / "list").write_text("\n".join(keys_of(url, tuple(range(18)))))
    source = {"url": url, "purged": str(tmp_path / "list")}
    config = write_config(tmp_path / "c.yaml", url, source=source)
    assert run(config, "--until-full") == (0, "")
    assert delivered(tmp_path / "c") == {18, 19}
    assert status(tmp_path / "c").holes == 0


def test_a_damaged_sidecar_hinders_no_purge(tmp_path: Path, url: str, purge: Said) -> None:
    """Nobody knows what its shard holds, so all of it goes."""
    config = write_config(tmp_path / "c.yaml", url)
    cache = tmp_path / "c"
    assert run(config, "--until-full")[0] == 0
    sidecar = CacheLayout(cache).sidecar(0)
    sidecar.write_bytes(sidecar.read_bytes()[:-2] + b" }")
    code, report = purge(cache, *keys_of(url))
    assert (code, report["recorded"], report["held"]) == (0, len(PURGED), [])
    assert 0 in report["dropped"]
    assert not sidecar.exists()
