"""The samples that all loaders deliver, and how a client comes to their bucket."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.slow_link.loop import SAMPLE_BYTES

KEY, SECRET = "growcache", "growcache-secret"
COUNT = 4096  # 1 GiB
KEYS = [f"npy/{number:06d}.npy" for number in range(COUNT)]
SHARD_BYTES = 16_000_000  # of the formats that have shards: a cache of 256 MB holds 16


def sample(number: int) -> bytes:
    """Return its values, which nothing can compress."""
    rng = np.random.default_rng([number, 27])
    return rng.integers(0, 2**31 - 2**24, SAMPLE_BYTES // 4, np.int32).tobytes()


def client_options(endpoint: str) -> dict[str, Any]:
    """Return boto3's arguments."""
    return {
        "endpoint_url": endpoint,
        "aws_access_key_id": KEY,
        "aws_secret_access_key": SECRET,
        "region_name": "us-east-1",
    }


def client_environment(endpoint: str) -> dict[str, str]:
    """Return the same as variables."""
    return {
        "S3_ENDPOINT_URL": endpoint,
        "AWS_ALLOW_HTTP": "true",
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
    }
