"""The dashboard's answers, headers and refusals, asked of the application without a socket."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from growcache.cache.status import write_status
from growcache.cache.status_model import Status
from growcache.errors import ConfigError
from growcache.monitor import server
from growcache.monitor.caches import FreshValue, named_caches
from growcache.monitor.http_server import Address, are_metrics_public, listen, read_token
from growcache.monitor.server import create_app
from tests.filled import Filled

TOKEN = "a" * 20
NEVER_TOLD = ("batches", "wait_seconds", "epoch", "reuse", "ess_samples")


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Filled]:
    """A cache of 30 samples with a history, whose writer lives and shows a status."""
    with Filled(tmp_path_factory.mktemp("monitor") / "train") as filled:
        filled.add(0, 1, 2)
        index_writer = filled.cache.index_writer
        index_writer.append_history({"samples": 10, "jobs": {"j": {"delivered": 5}}})
        index_writer.append_history({"samples": 30, "state": "running", "odd": [1]})
        told = Status(state="running", samples=30, waiting_for="<b>room</b>", pid=os.getpid())
        write_status(filled.root, replace(told, updated_at=time.time()))
        yield filled


def client_of(
    *caches: Path,
    token: str | None = None,
    prefix: str = "",
    base_url: str = "http://localhost:8650",
    public_metrics: bool = False,
) -> TestClient:
    app = create_app(caches, token=token, prefix=prefix, public_metrics=public_metrics)
    return TestClient(app, base_url=base_url, follow_redirects=False)


@pytest.fixture(scope="module")
def client(filled: Filled, tmp_path_factory: pytest.TempPathFactory) -> TestClient:
    return client_of(filled.root, tmp_path_factory.mktemp("empty") / "val")


def test_status_of_each_cache(client: TestClient, filled: Filled) -> None:
    assert client.get("/status.json").json()["samples"] == 30
    assert client.get("/status.json?cache=train").json()["path"] == str(filled.root)
    first, second = client.get("/caches.json").json()
    assert (first["name"], first["status"]["samples"]) == ("train", 30)
    assert (second["name"], second["status"]) == ("val", None)
    assert "no cache at" in second["error"]


@pytest.mark.parametrize(
    ("address", "code", "said"),
    [
        ("/status.json?cache=val", 503, "no cache at"),
        ("/status.json?cache=other", 404, "there is train, val"),
        ("/history.json?since=now", 400, "since must be a number"),
        ("/history.json?since=nan", 400, "since must be a number"),
        ("/elsewhere", 404, "Not Found"),
    ],
)
def test_errors_are_json(client: TestClient, address: str, code: int, said: str) -> None:
    answer = client.get(address)
    assert answer.status_code == code
    assert said in answer.json()["error"]


def test_a_cache_that_cannot_be_there_hides_no_other(filled: Filled, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    client = client_of(filled.root, tmp_path / "file" / "odd")
    assert "no cache at" in client.get("/status.json?cache=odd").json()["error"]
    assert [one["name"] for one in client.get("/caches.json").json()] == ["train", "odd"]


def test_history_by_column(client: TestClient) -> None:
    columns = client.get("/history.json").json()
    assert columns["samples"] == [10, 30]
    assert columns["state"] == [None, "running"]
    assert columns["jobs"] == {
        "j": {
            "delivered": [5, 5],  # a job that did not change is not written again
            **{name: [None, None] for name in NEVER_TOLD},
            "rank_wait_seconds": {},
        }
    }
    later = client.get("/history.json", params={"since": columns["at"][0]}).json()
    assert later["samples"] == [30]


@pytest.mark.parametrize(
    ("address", "code", "said"),
    [
        ("/healthz", 200, "lives"),
        ("/readyz", 200, "ready"),
        ("/readyz?min_samples=30", 200, "ready"),
        (
            "/readyz?min_samples=31",
            503,
            "30 of 31 samples are cached; the service waits for <b>",
        ),
        ("/readyz?cache=val", 503, "no cache at"),
    ],
)
def test_probes(client: TestClient, address: str, code: int, said: str) -> None:
    answer = client.get(address)
    assert (answer.status_code, said in answer.text) == (code, True), answer.text
    assert answer.headers["content-type"].startswith("text/plain")


def test_a_complete_cache_is_ready_for_any_number(tmp_path: Path) -> None:
    with Filled(tmp_path / "small") as filled:
        filled.add(0)
        filled.complete()
        write_status(filled.root, Status(samples=10, complete=True))
    assert client_of(filled.root).get("/readyz?min_samples=5000").text == "ready\n"


def test_every_response_carries_the_headers(client: TestClient) -> None:
    for address in ("/", "/status.json", "/elsewhere", "/healthz"):
        headers = client.get(address).headers
        assert "default-src 'none'; script-src 'self'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-store"


def test_a_defect_carries_them_too(filled: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: Path, since: float) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(server, "read_history", broken)
    app = create_app([filled.root])
    client = TestClient(app, base_url="http://localhost", raise_server_exceptions=False)
    answer = client.get("/history.json")
    assert (answer.status_code, "ZeroDivisionError" in answer.json()["error"]) == (500, True)
    assert "default-src 'none'" in answer.headers["content-security-policy"]


@pytest.mark.parametrize("method", ["post", "put", "delete", "patch"])
def test_nothing_can_be_changed(client: TestClient, method: str) -> None:
    assert getattr(client, method)("/status.json").status_code == 405


@pytest.mark.parametrize(
    ("host", "code"),
    [
        ("localhost:9000", 200),
        ("127.0.0.1", 200),
        ("[::1]:8650", 200),
        ("127.0.0.2:8650", 200),
        ("192.168.1.7:8650", 421),
        ("evil.example:8650", 421),
        ("127.0.0.1.evil.example", 421),
        ("localhost.evil.example", 421),
    ],
)
def test_other_host_names_are_refused_without_a_token(
    filled: Filled, host: str, code: int
) -> None:
    answer = client_of(filled.root).get("/status.json", headers={"Host": host})
    assert answer.status_code == code


def test_a_token_is_asked_for_and_kept_in_a_cookie(filled: Filled) -> None:
    client = client_of(filled.root, token=TOKEN, base_url="http://gpu7:8650")
    assert client.get("/status.json").status_code == 401
    assert client.get("/status.json?token=" + "b" * 20).status_code == 401
    bearer = {"Authorization": f"Bearer {TOKEN}"}
    assert client.get("/status.json", headers=bearer).status_code == 200
    answer = client.get(f"/history.json?since=1&token={TOKEN}")
    assert (answer.status_code, answer.headers["location"]) == (303, "./history.json?since=1")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "samesite=strict" in cookie.lower()
    assert TOKEN not in cookie
    assert client.get("/history.json?since=1").status_code == 200
    forged = {b"Cookie": b'growcache_8650="\xe9"'}
    stranger = client_of(filled.root, token=TOKEN, base_url="http://gpu7:8650")
    assert stranger.get("/status.json", headers=forged).status_code == 401


def test_probes_need_no_token_and_tell_no_reason(filled: Filled) -> None:
    client = client_of(filled.root, token=TOKEN, base_url="http://gpu7:8650")
    assert client.get("/healthz").status_code == 200
    assert client.get("/readyz?min_samples=31").text == "not ready\n"


@pytest.mark.parametrize("public", [False, True])
def test_metrics_need_no_token_where_they_are_public(filled: Filled, public: bool) -> None:
    client = client_of(
        filled.root, token=TOKEN, base_url="http://10.0.0.7:8650", public_metrics=public
    )
    assert client.get("/metrics").status_code == (200 if public else 401)
    assert client.get("/status.json").status_code == 401


def test_whether_metrics_are_public_is_yes_or_no() -> None:
    assert are_metrics_public({"GROWCACHE_PUBLIC_METRICS": "1"})
    assert not are_metrics_public({})
    with pytest.raises(ConfigError, match="must be 0 or 1, found 'yes'"):
        are_metrics_public({"GROWCACHE_PUBLIC_METRICS": "yes"})


def test_addresses_begin_with_the_prefix(filled: Filled) -> None:
    client = client_of(filled.root, prefix="jobs/7/")
    assert client.get("/jobs/7/status.json").status_code == 200
    assert client.get("/jobs/7/").status_code == 200
    assert client.get("/status.json").status_code == 404
    answer = client.get("/jobs/7")
    assert (answer.status_code, answer.headers["location"]) == (307, "./7/")
    with pytest.raises(ConfigError, match="--prefix must be a path"):
        create_app([filled.root], prefix="/{x}")


def test_other_addresses_need_a_token(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="set GROWCACHE_TOKEN or --token-file"):
        listen(Address("0.0.0.0", 0), None)
    listen(Address("0.0.0.0", 0), TOKEN).close()
    with (
        listen(Address("127.0.0.1", 0), None) as taken,
        pytest.raises(ConfigError, match="choose another address"),
    ):
        listen(Address("127.0.0.1", taken.getsockname()[1]), None)
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    assert read_token(file, {}) == TOKEN
    assert read_token(None, {}) is None
    with pytest.raises(ConfigError, match="GROWCACHE_TOKEN must have at least 16"):
        read_token(None, {"GROWCACHE_TOKEN": "short"})
    with pytest.raises(ConfigError, match="must be plain ASCII"):
        read_token(None, {"GROWCACHE_TOKEN": "é" * 20})
    with pytest.raises(ConfigError, match="cannot be read"):
        read_token(tmp_path / "none", {})


@pytest.mark.parametrize("text", ["", "host", "host:", ":8650", "host:99999", "1.2.3.4:x"])
def test_odd_addresses_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--http expects HOST:PORT"):
        Address.parse(text)


def test_a_value_is_read_as_often_as_its_cost_allows_or_where_its_stamp_changed() -> None:
    now, reads, stamp = [0.0], [0], ["a"]

    def read() -> int:
        now[0] += 0.2  # what it takes
        reads[0] += 1
        return reads[0]

    value = FreshValue(read, lambda: stamp[0], cost_share=0.02, clock=lambda: now[0])
    found = []
    for at, word in ((0.0, "a"), (0.5, "b"), (2.0, "b"), (2.5, "c"), (9.0, "c"), (13.0, "c")):
        now[0], stamp[0] = max(at, now[0]), word
        found.append(value.get())
    assert found == [1, 1, 2, 2, 3, 3]


def test_names_of_caches_are_distinct() -> None:
    paths = [Path("/a/x/cache"), Path("/a/y/cache"), Path("/a/y/cache"), Path("/a/other")]
    assert list(named_caches(paths)) == ["x/cache", "y/cache", "other"]
