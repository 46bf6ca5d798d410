"""The loaders that one suite holds to one contract."""

from __future__ import annotations

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
