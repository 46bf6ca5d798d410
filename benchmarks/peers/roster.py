"""Who takes part: titles, environments, and the settings that each is tried in.

A short trial finds the fastest setting, which is compared. That is done for each case and
each loop anew. Each setting has the reason why a user in need of speed would choose it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from benchmarks.peers.cases import Case

Setting = dict[str, Any]
OWN = "own"  # the environment of growcache itself


@dataclass(frozen=True, slots=True)
class Contestant:
    """A way of feeding a training loop.

    Attributes:
        module: in `benchmarks.peers.contestants`.
        title: in the tables.
        environment: where its packages are: `OWN`, or a file of `environments/`.
        settings: by their names in the tables.
        packages: whose versions are reported.
        why: what makes its settings the best that are known.
        limit: what it is instead of a peer, a yardstick.
        shaped: settings that only samples of one shape have.
    """

    module: str
    title: str
    environment: str
    settings: dict[str, Setting]
    packages: tuple[str, ...]
    why: str
    limit: bool = False
    shaped: tuple[str, ...] = ()


WORKERS: dict[str, Setting] = {f"{n} workers": {"workers": n} for n in (0, 1, 2)}
WHOLE: dict[str, Setting] = {"": {}}


def _rows_and_batches() -> dict[str, Setting]:
    return {
        f"{n} workers, {how}": {"workers": n, "batches": how == "batches"}
        for how in ("rows", "batches")
        for n in (0, 1, 2)
    }


CONTESTANTS = {
    contestant.module: contestant
    for contestant in (
        Contestant(
            "growcache",
            "growcache",
            OWN,
            {how: {"gather": how} for how in ("thread", "process")},
            ("growcache", "torch", "numpy"),
            "`EpochLoader` of `growcache.torch` over a tfrecord cache, with defaults except "
            "`gather`. The default `gather` measures for some seconds, longer than a round",
        ),
        Contestant(
            "memcpy",
            "memcpy",
            OWN,
            WHOLE,
            ("numpy",),
            "the limit for large samples. It copies rows of an array in memory, one by one, "
            "into eight buffers in turns",
            limit=True,
        ),
        Contestant(
            "memcpy_hot",
            "memcpy, one buffer",
            OWN,
            WHOLE,
            ("numpy",),
            "the same into a single buffer, which stays in the CPU's cache. It is the limit for "
            "a loader that makes each batch on demand, in the memory of the last one. A loader "
            "that reads ahead cannot reach it",
            limit=True,
        ),
        Contestant(
            "take",
            "one take",
            OWN,
            {
                "numpy": {"how": "numpy"},
                "torch, 1 thread": {"how": "torch", "threads": 1},
                "torch, 2 threads": {"how": "torch", "threads": 2},
            },
            ("numpy", "torch"),
            "the limit for small samples. It makes one `np.take` or `torch.index_select` per "
            "batch out of an array in memory into the same eight buffers. For samples that "
            "differ in size, it makes one `np.concatenate`",
            limit=True,
            shaped=("torch, 1 thread", "torch, 2 threads"),
        ),
        Contestant(
            "dataloader_mmap",
            "DataLoader, mmap",
            OWN,
            _rows_and_batches(),
            ("torch", "numpy"),
            "`torch.utils.data.DataLoader` over one `np.load(mmap_mode='r')`. The data set "
            "gives rows, or whole batches by `__getitems__` (one take). Workers are persistent",
        ),
        Contestant(
            "dataloader_files",
            "DataLoader, files",
            OWN,
            WORKERS,
            ("torch", "numpy"),
            "a file per sample, read by `np.fromfile`, which parses no header. Workers are "
            "persistent",
        ),
        Contestant(
            "mosaicml",
            "MosaicML Streaming",
            "mosaicml",
            WORKERS,
            ("mosaicml-streaming", "torch"),
            "`bytes` columns, the cheapest to decode, in uncompressed shards of 64 MB. One "
            "`np.stack` makes a batch",
        ),
        Contestant(
            "litdata",
            "LitData",
            "libraries",
            WORKERS,
            ("litdata", "torch"),
            "`bytes` leaves in uncompressed chunks of 64 MB, mapped in place (its default). One "
            "`np.stack` makes a batch",
        ),
        Contestant(
            "webdataset",
            "WebDataset",
            "libraries",
            WORKERS,
            ("webdataset", "torch"),
            "raw bytes in plain tar files, batched before the loader. It shuffles by a buffer "
            "of an eighth of the samples",
        ),
        Contestant(
            "tfrecord",
            "tfrecord",
            "libraries",
            WORKERS,
            ("tfrecord", "torch"),
            "bytes features with index files. It shuffles by a queue of an eighth of the samples",
        ),
        Contestant(
            "tfdata",
            "tf.data",
            "libraries",
            {
                "2 calls": {"calls": 2},
                "AUTOTUNE": {"calls": None},
                "2 calls, private pool": {"calls": 2, "pool": 2},
            },
            ("tensorflow-cpu",),
            "`TFRecordDataset`, interleaved, not deterministic, prefetched. Batches are parsed "
            "by one vectorised `parse_example` and `decode_raw`. It shuffles by a buffer of an "
            "eighth of the samples",
        ),
        Contestant(
            "huggingface",
            "HF datasets",
            "libraries",
            WORKERS | {"torch format": {"workers": 0, "as_torch": True}},
            ("datasets", "pyarrow", "torch"),
            "`with_format('arrow')`. One call gives a whole batch, whose contiguous column is "
            "viewed as an array. Format torch is tried, too, if all samples have one shape",
            shaped=("torch format",),
        ),
        Contestant(
            "grain_records",
            "grain",
            "libraries",
            {
                "0 workers, 0 threads": {"workers": 0, "threads": 0},
                "0 workers, 2 threads": {"workers": 0, "threads": 2},
                "0 workers, 16 threads": {"workers": 0, "threads": 16},
                "1 workers": {"workers": 1, "threads": 0},
                "2 workers": {"workers": 2, "threads": 0},
            },
            ("grain", "array-record"),
            "ArrayRecord with groups of one, uncompressed, as its guide says for random "
            "access. One `np.stack` makes a batch",
        ),
        Contestant(
            "tensordicts",
            "tensordict memmap (TorchRL)",
            "libraries",
            {f"{n} threads": {"threads": n} for n in (1, 2)},
            ("tensordict", "torch"),
            "`TensorDict.load_memmap(…)[indices]`, one vectorised take per field",
            shaped=("1 threads", "2 threads"),
        ),
        Contestant(
            "lmdb_rows",
            "LMDB",
            "libraries",
            WORKERS,
            ("lmdb", "torch"),
            "one environment without locks, and one transaction per batch. Values are copied "
            "straight from the map (`buffers=True`) into the batch",
        ),
    )
}


def entrants(chosen: list[Contestant], case: Case) -> list[Contestant]:
    """Return those who have such samples, with the settings that can deliver them."""
    if case.shape is not None:
        return chosen
    kept = [
        replace(c, settings={k: v for k, v in c.settings.items() if k not in c.shaped})
        for c in chosen
    ]
    return [c for c in kept if c.settings]


def contestants(names: list[str] | None = None) -> list[Contestant]:
    """Return those named, or all, in the order in which they run."""
    return [CONTESTANTS[name] for name in names or CONTESTANTS]
