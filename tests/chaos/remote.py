"""The store: a real S3 server behind a bad link, and objects that are rewritten and deleted."""

from __future__ import annotations

import contextlib
import random
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.chaos.content import CHANGING, changes, etag, key_name, object_bytes, rows_of
from tests.servers import Bucket, S3Server
from tests.servers.ceph import ceph, missing
from tests.servers.moto import moto
from tests.servers.slowlink import SlowLink, slowlink

_CALM: dict[str, float] = {
    "latency_seconds": 0, "bytes_per_second": 0, "slow": 0, "unavailable": 0, "refusal": 503,
    "retry_after": 0, "resets": 0, "stalls": 0, "expired": 0, "truncated": 0,
}  # fmt: skip


@contextlib.contextmanager
def s3_server(kind: str) -> Iterator[S3Server]:
    """Run an S3 server: ``ceph``, ``moto``, or ``auto`` for the stricter installed one."""
    if kind == "moto" or (kind == "auto" and missing()):
        with moto() as server:
            yield server
        return
    root = Path(tempfile.mkdtemp(prefix="ceph-", dir="/tmp"))
    try:
        with ceph(root, memory_bytes=1 << 30) as server:
            yield server
    finally:
        shutil.rmtree(root, ignore_errors=True)


class Remote:
    """The objects, and their changes.

    Attributes:
        versions: The present version of each key; None if it is deleted.
        link: The bad link.
        heavy_tailed: Whether each object is one sample, of a heavy-tailed size.
        bad_key: The key that is always answered with 503; empty if there is none.
    """

    def __init__(
        self, bucket: Bucket, link: SlowLink, count: int, *, heavy_tailed: bool = False
    ) -> None:
        self._bucket = bucket
        self.heavy_tailed = heavy_tailed
        self.link = link
        self.versions: dict[int, int | None] = dict.fromkeys(range(count), 0)
        self.bad_key = ""
        self._calm = dict(_CALM)

    @classmethod
    @contextlib.contextmanager
    def running(cls, kind: str, count: int, *, heavy_tailed: bool = False) -> Iterator[Remote]:
        """Fill a bucket of such a server with ``count`` objects, behind a link."""
        with s3_server(kind) as server:
            bucket = Bucket.make(server)
            with slowlink(server.endpoint) as link, ThreadPoolExecutor(8) as pool:
                remote = cls(bucket, link, count, heavy_tailed=heavy_tailed)
                list(pool.map(lambda n: remote.put(n, 0), range(count)))
                yield remote

    def put(self, key: int, version: int) -> None:
        """Put a version of an object into the bucket."""
        self._bucket.put(key_name(key), object_bytes(key, version, self._rows(key)))

    def etag(self, key: int, version: int) -> str:
        """Return the ETag of a version of an object."""
        return etag(key, version, self._rows(key))

    def _rows(self, key: int) -> int:
        return rows_of(key, heavy_tailed=self.heavy_tailed)

    @property
    def server(self) -> str:
        """The name of the server."""
        return self._bucket.server.name

    def source(self) -> dict[str, Any]:
        """Return the section ``source`` of a config."""
        options = {**self._bucket.storage_options, "endpoint_url": self.link.endpoint}
        return {
            "url": self._bucket.url("chaos/*.npy"),
            "format": "npy",
            "options": {} if self.heavy_tailed else {"axis": 0},
            "storage_options": options,
        }

    def set_link(self, faults: dict[str, float]) -> None:
        """Set the faults of the link from now on."""
        self._calm = {**_CALM, **faults}
        self.link.set(**self._calm)

    def outage(self) -> None:
        """Answer every request with SlowDown."""
        self.link.set(unavailable=1.0)

    def storm(self, luck: float) -> None:
        """Refuse most requests, as an overloaded store does; it may say when to come again."""
        dice = random.Random(luck)
        self.link.set(
            unavailable=dice.uniform(0.5, 0.9),
            refusal=dice.choice([429, 503]),
            retry_after=dice.choice([0, 1]),
        )

    def expire(self) -> None:
        """Refuse every request because the credentials have expired."""
        self.link.set(expired=1.0)

    def recover(self) -> None:
        """End the outage, and renew the credentials."""
        self.link.set(**self._calm)

    def turn_bad(self, luck: float) -> bool:
        """Let an unchanging object answer 503 from now on, or end that.

        Returns:
            Whether an object fails now.
        """
        steady = [key for key in self.versions if key % CHANGING]
        chosen = "" if self.bad_key else key_name(random.Random(luck).choice(steady))
        self.bad_key = chosen
        self.link.set(bad_path=chosen)
        return bool(chosen)

    def rewrite(self, luck: float) -> bool:
        """Replace an object by another version; return whether there was one to replace."""
        return self._change(luck, lambda version: version is not None, 1)

    def delete(self, luck: float) -> bool:
        """Delete an object; return whether there was one to delete."""
        return self._change(luck, lambda version: version is not None, None)

    def restore(self, luck: float) -> bool:
        """Restore the listed version of an object; return whether one had changed."""
        return self._change(luck, lambda version: version != 0, 0)

    def _change(self, luck: float, which: Any, step: int | None) -> bool:
        keys = [k for k, now in self.versions.items() if changes(key_name(k)) and which(now)]
        if not keys:
            return False
        key = random.Random(luck).choice(keys)
        now = self.versions[key]
        if step is None:
            self._bucket.delete(key_name(key))
            self.versions[key] = None
            return True
        version = 0 if step == 0 else (now or 0) + 1
        self.put(key, version)
        self.versions[key] = version
        return True
