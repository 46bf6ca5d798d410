"""docs/deploy/monitor/*.webp: the page of a real run, light, dark and on a phone, and of 100,000 shards.

nginx serves recordings behind a link of limited speed; two jobs of two ranks each train on the cache meanwhile, for ``--seconds``
(default 600). Some samples of the second rank are slow to transform, so that its loop waits for them.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks.page import DAY, SHARDS, dashboard, last_status, running_cache
from benchmarks.servers import Server, make_bucket, running_server
from growcache.cache.status import read_status, write_status
from growcache.numpy import EpochLoader
from growcache.sampling.serve import serve
from tests.browsers import Browser, running_browser
from tests.servers.slowlink import slowlink

TARGET = Path(__file__).parent.parent / "docs" / "deploy/monitor"
RECORDINGS, CHANNELS, ROWS, WINDOW = 24, 64, 60_000, 400
LINK_BYTES_PER_SECOND, MAX_BYTES = 2e6, 200_000_000
JOBS = {"lr-sweep": 9.0, "resnet18": 10.0}  # samples per second of each rank
RANKS, BATCH, MIN_SAMPLES = 2, 10, 200
SLOW_SHARE, SLOW_SECONDS = 1 / 1200, 3.0  # of the samples of the second rank
SHOWN_HOST = "gpu7"
WHOLE = "performance.getEntriesByName('growcache:whole').length"
SIZES = {"wide": (1280, 1420, False), "phone": (360, 1300, True)}
SCALE = 1.5
REPLACE = """
(() => {
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode;
    for (const [found, shown] of arguments[0]) node.textContent = node.textContent.replaceAll(found, shown);
  }
})()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--out", type=Path, default=TARGET)
    parser.add_argument("--shards", type=int, default=SHARDS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="screenshots-") as name:
        of_a_run(Path(name) / "eeg-motor", arguments.seconds, arguments.out)
        of_many_shards(Path(name) / "satellite", arguments.shards, arguments.out)


def of_a_run(cache: Path, seconds: float, out: Path) -> None:
    with running_server("nginx") as server:
        write_recordings(server)
        with slowlink(server.endpoint, bytes_per_second=LINK_BYTES_PER_SECOND) as link:
            options = {**server.storage_options, "endpoint_url": link.endpoint}
            config = {
                "source": {
                    "url": "s3://eeg/*.npy",
                    "storage_options": options,
                    "options": {"window": WINDOW},
                },
                "sampling": {"max_skipped": 0.1},
                "cache": {"path": str(cache), "max_bytes": MAX_BYTES},
            }
            with (
                serve(config),
                training_on(cache),
                dashboard(cache, cache.with_name("log")) as url,
            ):
                time.sleep(seconds)
                with running_browser() as browser:
                    for file, size, scheme in (
                        ("light", "wide", "light"), ("dark", "wide", "dark"), ("phone", "phone", "light"),
                    ):  # fmt: skip
                        shoot(browser, url, cache, out / f"{file}.webp", size, scheme)


def of_many_shards(cache: Path, shards: int, out: Path) -> None:
    with running_cache(cache, shards, 7 * DAY), dashboard(cache, cache.with_name("log")) as url:
        write_status(cache, last_status(7 * DAY, shards))
        with running_browser() as browser:
            shoot(browser, url, cache, out / "shards.webp", "wide", "light", "map-cells")


def shoot(
    browser: Browser,
    url: str,
    cache: Path,
    file: Path,
    size: str,
    scheme: str,
    shown: str = "answers",
) -> None:
    """Save what is seen when the element ``shown`` is in the middle."""
    width, height, mobile = SIZES[size]
    browser.resize(width, height, mobile=mobile, scale=SCALE)
    browser.prefer(scheme)
    browser.open(url, WHOLE)
    browser.ask(
        REPLACE,
        [[str(cache.parent), "/nvme"], [f"on {socket.gethostname()}", f"on {SHOWN_HOST}"]],
    )
    browser.ask(
        "document.getElementById(arguments[0]).scrollIntoView({block: 'center'})", shown
    )
    browser.save_screenshot(file)
    print(f"{file}: {file.stat().st_size / 1000:.0f} kB")


def write_recordings(server: Server) -> None:
    """Write rhythms with noise, and one recording of another shape."""
    assert server.folder is not None
    make_bucket(server, "eeg")
    rng, at = np.random.default_rng(0), np.arange(ROWS)[:, None] / 200
    for i in range(RECORDINGS):
        rhythms = np.sin(
            2 * np.pi * rng.uniform(8, 12, CHANNELS) * at + rng.uniform(0, 6, CHANNELS)
        )
        rows = (
            rhythms * rng.uniform(0.5, 2, CHANNELS) + rng.normal(size=(ROWS, CHANNELS))
        ).astype("<f4")
        np.save(server.folder / "eeg" / f"sub-{i:02d}.npy", rows)
    np.save(server.folder / "eeg" / "sub-99.npy", np.zeros((ROWS // 10, 3), "<f4"))


def transform(sample: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
    if rng.random() < SLOW_SHARE:
        time.sleep(SLOW_SECONDS)
    return sample


def train(cache: str, job: str, rank: int, samples_per_second: float) -> None:
    """Train at a steady pace, until this process is ended."""
    loader = EpochLoader(
        cache, batch_size=BATCH, min_samples=MIN_SAMPLES, job=job, rank=rank, world_size=RANKS,
        transform=transform if rank else None,
    )  # fmt: skip
    due = 0.0
    while True:
        for _ in loader:
            due = max(due, time.monotonic() - 1.0) + BATCH / samples_per_second
            time.sleep(max(0.0, due - time.monotonic()))


@contextmanager
def training_on(cache: Path) -> Iterator[None]:
    while not cache.exists() or read_status(cache).samples < MIN_SAMPLES:
        time.sleep(0.5)
    start = multiprocessing.get_context("spawn").Process
    loops = [
        start(target=train, args=(str(cache), job, rank, pace), daemon=True)
        for job, pace in JOBS.items()
        for rank in range(RANKS)
    ]
    for loop in loops:
        loop.start()
    try:
        yield
    finally:
        for loop in loops:
            loop.terminate()
            loop.join()


if __name__ == "__main__":
    main()
