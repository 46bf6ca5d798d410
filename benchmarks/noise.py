"""Incompressible samples, made by NumPy alone because every environment must make the same ones."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def random_samples(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> Array:
    """Return incompressible bytes as an array; floats are finite, between 1 and 2."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    noise = np.frombuffer(rng.bytes(size), np.uint8)
    if dtype == "<f4":
        return (
            (noise.view("<u4") >> np.uint32(9) | np.uint32(0x3F80_0000))
            .view(dtype)
            .reshape(shape)
        )
    return noise.view(dtype).reshape(shape)
