"""E2: how large the cache must be, for a language model of bytes that learns Python from pinned packages.

Windows of text, of which some packages are held out, and equal steps. Arms: growing caches of 1 to
25 % of the training windows, frozen subsets on the same disk, and full data. In growing caches a
window is used 3 to 6 times; between these uses the eviction policy decides which shard goes.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial

import numpy as np
import torch

from benchmarks.accuracy.experiment import Arm, Experiment, Place, Task, Variant
from benchmarks.accuracy.growing import GrowingFeed, Settings, growing_feed
from benchmarks.accuracy.metrics import BITS_PER_BYTE
from benchmarks.accuracy.models import text_model
from benchmarks.accuracy.reuse import echoed
from benchmarks.accuracy.training import Batch, Recipe, bits_per_byte, next_byte_loss
from benchmarks.accuracy.wheels import Bytes, Labelled, python_text, wheel

PACKAGES = (
    *("accelerate==1.15.0", "anndata==0.12.6", "asyncssh==2.24.1", "dask==2026.8.0"),
    *("datasets==5.2.0", "docker==7.2.0", "fsspec==2026.9.0", "huggingface_hub==2.4.0"),
    *("imageio==2.38.1", "ipython==9.18.1", "jedi==0.20.1", "jinja2==3.1.6", "mpmath==1.3.0"),
    *("networkx==3.6.1", "nibabel==5.4.2", "prompt_toolkit==3.0.53", "pygments==2.21.0"),
    *("rich==15.0.0", "trio==0.35.0", "werkzeug==3.1.9", "xarray==2026.9.0", "zarr==3.1.6"),
)
HELD_OUT = 4  # packages
PACKAGE_BYTES = 400_000  # of each package, so that none is most of the data
WINDOW = 256  # bytes
TEST_WINDOWS = 128  # of a held-out package, evenly spread
PER_OBJECT = 512  # windows that follow each other
PERCENTS = (1, 2, 5, 10, 25)
POLICY_PERCENTS = (2, 10)
REUSE = {"min_uses": 3, "max_reuse": 6, "on_max_reuse": "wait"}


def package_windows(seed: int) -> Task:
    """Return the windows of all packages but the held-out ones, in the order of the text."""
    order = np.random.default_rng(seed).permutation(len(PACKAGES))
    texts = [windows(python_text(wheel(PACKAGES[n]), PACKAGE_BYTES)) for n in order]
    spread = [text[np.linspace(0, len(text) - 1, TEST_WINDOWS).astype(int)] for text in texts]
    test = torch.from_numpy(np.concatenate(spread[:HELD_OUT]))
    training = np.concatenate(texts[HELD_OUT:])
    return Task(
        Labelled(training, np.zeros(len(training), np.int64)), Batch(test, test), max_bytes=0
    )


def windows(text: Bytes) -> Bytes:
    """Cut a text into windows that do not overlap; what is left at its end is no window."""
    return text[: len(text) // WINDOW * WINDOW].reshape(-1, WINDOW)


def shard_samples(samples: int) -> int:
    """Return the windows of a shard of a cache of that many: a fortieth, but not so few that files are mostly air."""
    return max(16, samples // 40)


def max_bytes(samples: int) -> int:
    """Return the bound in which a growing cache has that many windows at most; measured, see `cache_samples`."""
    shards = -(-samples // shard_samples(samples))
    return 600_000 + shards * 8_000 + samples * 390


def growing(place: Place, percent: int, eviction: str) -> AbstractContextManager[GrowingFeed]:
    """Train on a cache of a share of the windows, which are replaced as they are used."""
    samples = share(place, percent)
    return growing_feed(
        bounded(place, max_bytes(samples)),
        PER_OBJECT,
        samples // 3,
        sampling(samples),
        {"eviction": eviction, **REUSE},
    )


def frozen(place: Place, percent: int) -> AbstractContextManager[GrowingFeed]:
    """Train on a fixed share of the windows, from when all of them are there."""
    samples = share(place, percent)
    return growing_feed(
        bounded(place, 2 * max_bytes(samples)),  # the number of windows is what bounds it
        PER_OBJECT,
        samples,
        sampling(samples),
        {"eviction": "none", "max_samples": samples},
    )


def share(place: Place, percent: int) -> int:
    """Return this percentage of the windows for training, as a number of windows."""
    return len(place.task.training.labels) * percent // 100


def sampling(samples: int) -> Settings:
    """Return how a cache of that many windows is drawn: every window on its own."""
    return {"samples_per_object": 1, "shard_samples": shard_samples(samples)}


def bounded(place: Place, most: int) -> Place:
    """Return the place with another bound of the cache."""
    return place._replace(task=place.task._replace(max_bytes=most))


ARMS: dict[str, Arm] = {
    "full": partial(echoed, times=1),
    **{
        f"growing {share} %": partial(growing, percent=share, eviction="fifo")
        for share in PERCENTS
    },
    **{f"frozen {share} %": partial(frozen, percent=share) for share in PERCENTS},
    **{
        f"growing {share} %, {eviction}": partial(growing, percent=share, eviction=eviction)
        for eviction in ("random", "most_used")
        for share in POLICY_PERCENTS
    },
}
RECIPE = Recipe(
    steps=900,
    evaluate_every=75,
    batch_size=16,
    model=text_model,
    learning_rate=4e-3,
    loss=next_byte_loss,
    evaluate=bits_per_byte,
)
VARIANTS = {"cache size": Variant(package_windows, RECIPE)}
EXPERIMENT = Experiment(
    "cache_size", VARIANTS, ARMS, seeds=5, reference="full", metric=BITS_PER_BYTE
)
