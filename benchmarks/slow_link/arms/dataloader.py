"""torch's DataLoader over objects, one per sample, got by boto3 in workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.slow_link.loop import BATCH, SAMPLE_BYTES, SHAPE, Places
from benchmarks.slow_link.samples import KEYS, client_options

WORKERS = 8  # of processes: each waits for one object at a time


class Objects(torch.utils.data.Dataset[Any]):
    """The samples by number; each worker has a client of its own."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._client: Any = None

    def __len__(self) -> int:
        return len(KEYS)

    def __getitem__(self, index: int) -> torch.Tensor:
        if self._client is None:
            import boto3

            self._client = boto3.client("s3", **client_options(self._places.endpoint))
        found = self._client.get_object(Bucket=self._places.bucket, Key=KEYS[index])
        data = found["Body"].read()[-SAMPLE_BYTES:]
        return torch.from_numpy(np.frombuffer(bytearray(data), "<f4").reshape(SHAPE))


def batches(places: Places) -> Iterator[int]:
    loader = torch.utils.data.DataLoader(
        Objects(places), BATCH, shuffle=True, num_workers=WORKERS, persistent_workers=True
    )
    while True:
        for batch in loader:
            yield len(batch)
