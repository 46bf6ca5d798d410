"""The loader of PyTorch: batches are dicts of tensors."""

from __future__ import annotations

from typing import Any

import torch

from growcache.errors import FormatError
from growcache.loading.framework import Carrier, Framework
from growcache.loading.loader import Loader
from growcache.torch.copies import (
    copy_in_this_thread_alone,
    join_parts,
    take_rows,
    take_slices,
)
from growcache.torch.devices import sender_to


def _tensor(name: str, array: Any) -> torch.Tensor:
    try:
        return torch.from_numpy(array)
    except TypeError:
        raise FormatError(
            f"field {name!r} has dtype {array.dtype}, which torch does not have; cast it in "
            "sampling.transform or in the loader's transform"
        ) from None


def _distributed() -> tuple[int, int] | None:
    """Return (rank, world size) of the default process group; None where there is none."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


class EpochLoader(Loader):
    """Batches from a growing cache; every iteration is a new epoch over what is there by now.

    The next epoch's snapshot, plan and first batches are made before the current epoch ends.
    Tensors may be kept: their memory is reused only once nobody refers to it. A loader
    pickles as its arguments. Iterating anew ends the iteration before it.

    Yields dicts of field name to tensor [batch, *shape] in the dtype of the schema.
    """

    framework = Framework(
        *(take_rows, take_slices, join_parts, _tensor, copy_in_this_thread_alone, _distributed),
        frees_lock=True,
    )

    def _carrier_to(self, device: Any) -> Carrier | None:
        return None if device is None else sender_to(device)
