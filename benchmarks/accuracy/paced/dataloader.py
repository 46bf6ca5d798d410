"""torch's DataLoader over the raw objects: a worker reads the windows of a batch by range, all at once."""

from __future__ import annotations

import asyncio
import csv
from collections.abc import Iterator

import torch
from obstore.store import S3Store
from torch.utils.data import DataLoader, Dataset

from benchmarks.accuracy.paced.place import (
    BATCH,
    BUCKET,
    KEY,
    SECRET,
    WINDOW,
    Batch,
    Place,
    stacked,
)

WORKERS, AHEAD = 2, 4  # batches that each worker has in flight or ready


class Windows(Dataset[tuple[bytes, int]]):
    """The windows by number; each worker has a client of its own."""

    def __init__(self, place: Place) -> None:
        with place.table.open(encoding="utf-8", newline="") as file:
            rows = [
                (row["path"], int(row["y"]), int(row["windows"]))
                for row in csv.DictReader(file)
            ]
        self._places = [(key, n * WINDOW, y) for key, y, count in rows for n in range(count)]
        self._endpoint = place.endpoint
        self._store: S3Store | None = None

    def __len__(self) -> int:
        return len(self._places)

    def __getitems__(self, numbers: list[int]) -> list[tuple[bytes, int]]:
        return asyncio.run(self._read(numbers))

    async def _read(self, numbers: list[int]) -> list[tuple[bytes, int]]:
        if self._store is None:
            self._store = S3Store(
                BUCKET,
                endpoint=self._endpoint,
                access_key_id=KEY,
                secret_access_key=SECRET,
                region="us-east-1",
                virtual_hosted_style_request=False,
                client_options={"allow_http": True, "timeout": "10m"},
            )
        places = [self._places[number] for number in numbers]
        found = await asyncio.gather(
            *(
                self._store.get_range_async(f"raw/{k}", start=s, length=WINDOW)
                for k, s, _ in places
            )
        )
        return [(bytes(data), y) for data, (_, _, y) in zip(found, places, strict=True)]


def _collated(samples: list[tuple[bytes, int]]) -> Batch:
    windows, labels = zip(*samples, strict=True)
    return stacked(list(windows), list(labels))


def batches(place: Place) -> Iterator[Batch]:
    """Yield batches of every epoch."""
    loader = DataLoader(
        Windows(place),
        BATCH,
        shuffle=True,
        drop_last=True,
        num_workers=WORKERS,
        prefetch_factor=AHEAD,
        persistent_workers=True,
        collate_fn=_collated,
        generator=torch.Generator().manual_seed(place.seed),
    )
    while True:
        yield from loader
