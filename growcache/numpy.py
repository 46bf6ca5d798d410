"""NumPy's front door, and that of JAX: epochs over a cache as dicts of arrays."""

from __future__ import annotations

from growcache.loading.loader import Loader
from growcache.sampling.from_dataset import FromDataset

__all__ = ["EpochLoader"]


class EpochLoader(FromDataset, Loader):
    """Batches from a growing cache; every iteration is a new epoch over the shards that are cached by then.

    The next epoch's snapshot, plan and first batches are made before the current epoch ends.
    Arrays may be kept: their memory is recycled only once nothing refers to it. A loader
    pickles as its arguments. A new iteration ends the one before it.

    It takes the arguments of `growcache.torch.EpochLoader` (see ``help(EpochLoader)``) but
    ``device``, finds its ranks in ``RANK`` and ``WORLD_SIZE`` by default, and yields
    dicts of field name to array ``[batch, *shape]`` in the dtype of the schema.
    """
