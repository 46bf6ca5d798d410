"""Whether an epoch delivered every sample once: a digest of labels and bytes, in any order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.noise import Array
from benchmarks.peers.cases import Case

# A batch as arrays: x [n, *shape] and y [n], or values, offsets [n + 1] and y [n].
Batch = tuple[Array, ...]
WORD = 8  # bytes that are looked at in three places of each sample, besides all of them
_ODD = [
    np.uint64(n)
    for n in (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93)
]
_LAST = np.uint64(0x27D4EB2F165667C5)


def words(batch: Batch) -> Array:
    """Return the first, middle and last bytes of each sample and all of them, uint64 [n, 4].

    Those in three places tell where bytes stand, and the exclusive or of all of them whether
    they are there.
    """
    return np.concatenate((_places(batch), _together(batch)[:, None]), axis=1)


def _together(batch: Batch) -> Array:
    if len(batch) == 2:
        rows = batch[0].reshape(len(batch[1]), -1).view(np.uint64)
        together: Array = np.bitwise_xor.reduce(rows, axis=1)
        return together
    values, offsets, _ = batch
    return np.bitwise_xor.reduceat(values.view(np.uint8), offsets[:-1]).astype(np.uint64)


def _places(batch: Batch) -> Array:
    if len(batch) == 2:
        rows = batch[0].reshape(len(batch[1]), -1).view(np.uint8)
        middle = rows.shape[1] // 2
        places = (rows[:, :WORD], rows[:, middle : middle + WORD], rows[:, -WORD:])
        return np.concatenate(places, axis=1).view(np.uint64)
    values, offsets, _ = batch
    begins, ends = offsets[:-1], offsets[1:]
    firsts = np.stack([begins, (begins + ends) // 2, ends - WORD], axis=1)
    picked = values[firsts[:, :, None] + np.arange(WORD)]
    return picked.reshape(-1, 3 * WORD).view(np.uint64)


def digest(batch: Batch) -> int:
    """Return a number that sums up over batches, whatever their order."""
    mixed = batch[-1].astype(np.uint64)
    for column, odd in zip(words(batch).T, _ODD, strict=True):
        mixed = (mixed ^ column) * odd
        mixed ^= mixed >> np.uint64(29)
    return int((mixed * _LAST).sum(dtype=np.uint64))


def summed(digests: Sequence[int]) -> int:
    """Return the digest of several batches together."""
    return sum(digests) % 2**64


def expected(case: Case) -> int:
    """Return the digest of all samples of a case, each once."""
    return summed([digest(joined(values, labels)) for values, labels in case.each_shard()])


def joined(values: Sequence[Array], labels: Array) -> Batch:
    """Return samples of one or of different sizes as a batch."""
    if len({value.shape for value in values}) == 1 and values[0].ndim > 1:
        return np.stack(values), labels
    offsets = np.cumsum([0, *map(len, values)])
    return np.concatenate(values), offsets, labels


def repeated(case: Case, labels: Array, *, whole: bool) -> str | None:
    """Return what is wrong with the labels of an epoch, or of its beginning."""
    if labels.min(initial=0) < 0 or labels.max(initial=0) >= case.samples:
        return "a label that no sample has"
    counts = np.bincount(labels, minlength=case.samples)
    if counts.max(initial=0) > 1:
        return f"label {int(counts.argmax())} came {int(counts.max())} times"
    if whole and len(labels) != case.samples:
        return f"{len(labels)} samples instead of {case.samples}"
    return None
