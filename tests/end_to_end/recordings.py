"""The remote dataset of the end-to-end test, and what every sample of it must look like."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from growcache.schema import Array, Origin, Sample

COUNT = 2000
SHAPE = (32, 128)
SAMPLE_BYTES = 32 * 128 * 4


def recording(number: int) -> Array:
    """Return the content of object ``number``: float32 [32, 128], incompressible."""
    return np.random.default_rng(number).random(SHAPE, np.float32)


def as_npy(number: int) -> bytes:
    """Return the object's bytes."""
    out = io.BytesIO()
    np.save(out, recording(number))
    return out.getvalue()


def key(number: int) -> str:
    """Return the object's key."""
    return f"recordings/sub-{number % 7}/{number:06d}.npy"


def label(sample: Sample, origin: Origin) -> dict[str, Any]:
    """The transform of the service: adds which object it is, and a target to learn."""
    number = int(origin.key.rsplit("/", 1)[1].removesuffix(".npy"))
    return {**sample, "number": np.int64(number), "y": sample["x"].mean(dtype=np.float32)}


def wrong(numbers: Array, samples: Array) -> int:
    """Return how many of a batch differ from the objects they claim to be."""
    pairs = zip(numbers.tolist(), samples, strict=True)
    return sum(not np.array_equal(recording(number), sample) for number, sample in pairs)
