"""Buckets on the strict server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.servers import Bucket, S3Server


@pytest.fixture
def ceph_bucket(ceph_server: S3Server) -> Iterator[Bucket]:
    bucket = Bucket.make(ceph_server)
    yield bucket
    bucket.remove()
