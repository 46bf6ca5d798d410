"""The loaders that one suite holds to one contract."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

from growcache.loading.loader import Loader
from growcache.numpy import EpochLoader as NumpyLoader

LOADERS: dict[str, type[Loader]] = {"numpy": NumpyLoader}
try:
    from growcache.torch import EpochLoader as TorchLoader
except ImportError:  # torch is an extra
    pass
else:
    LOADERS["torch"] = TorchLoader


def as_numpy(value: Any) -> Any:
    """What a batch holds, as NumPy has it."""
    if isinstance(value, list):
        return [as_numpy(one) for one in value]
    return value if isinstance(value, str | bytes) else np.asarray(value)


def as_bytes(batch: Any) -> bytes:
    """All of a batch: names, dtypes, shapes, values."""
    values = batch.items() if isinstance(batch, dict) else enumerate(batch)
    return pickle.dumps([(name, as_numpy(value)) for name, value in values])
