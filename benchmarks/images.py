"""Decoded images per second: EpochLoader and torch's DataLoader, same files and decoder.

The images are JPEGs of about 500 x 375 pixels and 100 kB, made of noise at every scale, as
photographs are. Every variant delivers all of them once a round, cropped at random to
224 x 224, flipped by chance, in batches of which the loop looks at one element. The decoder
is `growcache.images.Decode` for all. `decoder` calls it in one thread and makes no batches.
"""

from __future__ import annotations

import io
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.measure import median, parser, report
from growcache.images import Decode
from growcache.schema import Array, Schema
from growcache.torch import EpochLoader
from tests.filled import Filled

BATCH = 64
SIZE = (224, 224)
WIDTH, HEIGHT, QUALITY = 500, 375, 92
SCALES = 7  # of the noise: each twice as fine as the one before, and about half as strong
WORKERS = (0, 1, 2)
SHARD_SAMPLES = 640  # about 64 MB


def photo(rng: np.random.Generator) -> bytes:
    """Return the JPEG of something that takes a decoder as long as a photograph does."""
    pixels = np.full((HEIGHT, WIDTH, 3), 128.0, np.float32)
    for scale in range(SCALES):
        shape = (3 * 2**scale, 4 * 2**scale)
        noise = rng.normal(0, 70 * 0.62**scale, (*shape, 3))
        for channel in range(3):
            # Brightness varies more than color does.
            layer = noise[..., 0] + 0.3 * noise[..., channel]
            image = Image.fromarray(layer.astype(np.float32))
            pixels[..., channel] += np.asarray(image.resize((WIDTH, HEIGHT)))
    pixels += rng.normal(0, 9, (HEIGHT, WIDTH, 1))
    file = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=QUALITY)
    return file.getvalue()


def decoder() -> Decode:
    """Return what every variant decodes with."""
    return Decode(SIZE, crop="random", flip=True)


class Files(torch.utils.data.Dataset[torch.Tensor]):
    """The DataLoader's data set: the files, read and decoded one by one."""

    def __init__(self, paths: list[Path]) -> None:
        self._paths = paths
        self._decode = decoder()

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, i: int) -> torch.Tensor:
        rng = np.random.default_rng(i)
        sample = self._decode({"image": self._paths[i].read_bytes()}, rng)
        return torch.from_numpy(sample["image"])


def prepare(directory: Path, count: int) -> list[Path]:
    """Write the files, and a cache of the same bytes."""
    rng = np.random.default_rng(0)
    schema, paths = Schema.declared({"image": "bytes"}), []
    with Filled(directory / "cache", schema=schema, max_bytes=10**10) as cache:
        for number in range(0, count, SHARD_SAMPLES):
            images = [photo(rng) for _ in range(min(SHARD_SAMPLES, count - number))]
            cache.add_samples(number, [{"image": data} for data in images])
            for i, data in enumerate(images):
                paths.append(directory / f"{number + i}.jpg")
                paths[-1].write_bytes(data)
    return paths


def decode_alone(paths: list[Path]) -> Iterator[Array]:
    """Yield images, decoded by one thread that does nothing else."""
    decode, rng = decoder(), np.random.default_rng(0)
    for path in paths:
        yield decode({"image": path.read_bytes()}, rng)["image"][None]


def load(directory: Path) -> Iterator[torch.Tensor]:
    """Yield the batches of one epoch of a new loader: one that runs on would work ahead."""
    options: dict[str, Any] = {"batch_size": BATCH, "min_samples": BATCH}
    with EpochLoader(directory / "cache", transform=decoder(), **options) as loader:
        for batch in loader:
            yield batch["image"]


def variants(directory: Path, paths: list[Path]) -> dict[str, Callable[[], Iterator[Any]]]:
    """Return what is measured, by name: an iterator over one epoch."""
    found: dict[str, Callable[[], Iterator[Any]]] = {
        "decoder": lambda: decode_alone(paths),
        "EpochLoader": lambda: load(directory),
    }
    for workers in WORKERS:
        data = torch.utils.data.DataLoader(
            Files(paths),
            batch_size=BATCH,
            shuffle=True,
            drop_last=True,
            num_workers=workers,
            persistent_workers=workers > 0,
        )
        found[f"DataLoader, {workers} workers"] = data.__iter__
    return found


def consume(batches: Iterator[Any]) -> int:
    """Look at one element of every batch; returns how many images came."""
    images = 0
    for batch in batches:
        images += len(batch)
        batch.reshape(-1)[-1].item()
    return images


def measure(directory: Path, paths: list[Path], rounds: int) -> dict[str, list[float]]:
    """Return images per second of every variant, interleaved."""
    runs = variants(directory, paths)
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):  # the first starts workers
        for name, run in runs.items():
            began = time.perf_counter()
            images = consume(run())
            seconds = time.perf_counter() - began
            assert images >= len(paths) // BATCH * BATCH, (name, images)
            if number:
                rates[name].append(images / seconds)
    return rates


def main() -> int:
    arguments = parser(__doc__)
    given = arguments.parse_args()
    count = 768 if given.quick else 3200
    with tempfile.TemporaryDirectory(dir=given.directory, prefix="images-") as place:
        paths = prepare(Path(place), count)
        size = sum(path.stat().st_size for path in paths) / count
        rates = measure(Path(place), paths, given.rounds or (2 if given.quick else 7))
    rows = []
    for name, found in rates.items():
        pairs = {
            f"x {other}": median([a / b for a, b in zip(found, rates[other], strict=True)])
            for other in ("decoder", "DataLoader, 2 workers")
        }
        rows.append({"variant": name, "images/s": median(found), **pairs})
    report(f"{count} JPEGs of {size / 1000:.0f} kB, decoded to {SIZE}", rows, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
