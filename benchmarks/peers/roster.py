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
            "`EpochLoader` of `growcache.torch` over a tfrecord cache, with `gather` said by "
            "hand, because the default decides between these two by measuring for some seconds, "
            "which is longer than a round; all else as it comes",
        ),
        Contestant(
            "memcpy",
            "memcpy",
            OWN,
            WHOLE,
            ("numpy",),
            "the limit for large samples: rows of an array in memory, copied one by one into "
            "eight buffers in turns (a single one would stay in the CPU's cache)",
            limit=True,
        ),
        Contestant(
            "memcpy_hot",
            "memcpy, one buffer",
            OWN,
            WHOLE,
            ("numpy",),
            "the same into a single buffer, which stays in the CPU's cache: what a loader can "
            "reach that makes a batch in the loop's own thread, only when it is asked for, in "
            "the memory of the one before; nothing that has a batch ready beforehand can",
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
            "the limit for small samples: one `np.take` or `torch.index_select` per batch out "
            "of an array in memory into the same eight buffers (of samples that differ in "
            "size, one `np.concatenate`)",
            limit=True,
            shaped=("torch, 1 thread", "torch, 2 threads"),
        ),
        Contestant(
            "dataloader_mmap",
            "DataLoader, mmap",
            OWN,
            _rows_and_batches(),
            ("torch", "numpy"),
            "`torch.utils.data.DataLoader` over one `np.load(mmap_mode='r')`; the data set "
            "gives rows, or whole batches by `__getitems__` (one take); persistent workers",
        ),
        Contestant(
            "dataloader_files",
            "DataLoader, files",
            OWN,
            WORKERS,
            ("torch", "numpy"),
            "a file per sample, read by `np.fromfile`, which parses no header; persistent "
            "workers",
        ),
        Contestant(
            "mosaicml",
            "MosaicML Streaming",
            "mosaicml",
            WORKERS,
            ("mosaicml-streaming", "torch"),
            "`bytes` columns, the cheapest to decode, uncompressed shards of 64 MB; a batch "
            "is put together by one `np.stack`",
        ),
        Contestant(
            "litdata",
            "LitData",
            "libraries",
            WORKERS,
            ("litdata", "torch"),
            "`bytes` leaves, uncompressed chunks of 64 MB, mapped in place (its default); a "
            "batch is put together by one `np.stack`",
        ),
        Contestant(
            "webdataset",
            "WebDataset",
            "libraries",
            WORKERS,
            ("webdataset", "torch"),
            "raw bytes in plain tar files, batched before the loader; shuffles by a buffer of "
            "an eighth of the samples",
        ),
        Contestant(
            "tfrecord",
            "tfrecord",
            "libraries",
            WORKERS,
            ("tfrecord", "torch"),
            "bytes features with index files; shuffles by a queue of an eighth of the samples",
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
            "`TFRecordDataset` interleaved, not deterministic, batched and then parsed by one "
            "vectorised `parse_example` and `decode_raw`, prefetched; shuffles by a buffer of "
            "an eighth of the samples",
        ),
        Contestant(
            "huggingface",
            "HF datasets",
            "libraries",
            WORKERS | {"torch format": {"workers": 0, "as_torch": True}},
            ("datasets", "pyarrow", "torch"),
            "`with_format('arrow')`, a whole batch by one call whose one contiguous column "
            "is viewed as an array; format torch is tried, too, where all have one shape",
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
            "access; a batch is put together by one `np.stack`",
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
            "one environment without locks; a batch in one transaction, "
            "values copied straight from the map (`buffers=True`) into the batch",
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
