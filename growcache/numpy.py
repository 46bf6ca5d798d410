"""Loaders for NumPy and JAX: epochs over a cache as dicts of arrays."""

from __future__ import annotations

from growcache.loading.loader import Loader
from growcache.sampling.from_dataset import FromDataset

__all__ = ["EpochLoader"]


class EpochLoader(FromDataset, Loader):
    """Batches from a growing cache.

    Each iteration is a new epoch over the shards cached by then.

    The arguments are those of `growcache.torch.EpochLoader` (see ``help(EpochLoader)``), except
    ``device``. Batches are dicts of field name to array ``[batch, *shape]``, in the dtype of
    the schema. The loader takes its rank from ``RANK`` and ``WORLD_SIZE`` by default.

    The next epoch's snapshot, plan and first batches are prepared before the current epoch
    ends. You may keep arrays, because their memory is recycled only after the last reference is
    gone. A loader pickles as its arguments. A new iteration ends the previous one.

    Example::

        from growcache.numpy import EpochLoader

        with EpochLoader("/data/cache", batch_size=64) as loader:
            for epoch in range(90):
                for batch in loader:
                    step(batch["x"], batch["y"])
    """
