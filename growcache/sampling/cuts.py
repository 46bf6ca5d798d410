"""How objects are cut into parts, each of which is one visit: as all of a source, or of each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Cut:
    """How the objects of one source are cut.

    Attributes:
        samples_per_object: about how many samples one visit yields.
        stride_bytes: bytes that an object advances per sample.
        overhead_bytes: bytes of an object that hold no sample.
        whole: each object is one part (it is read whole, or drawn at random and independently).
        ranged: whether its format reads parts of objects by byte range.
        samples_per_whole: about how many samples an object yields that is one part.
    """

    samples_per_object: int
    stride_bytes: float
    overhead_bytes: int
    whole: bool
    ranged: bool = True
    samples_per_whole: float = 1.0

    def parts(self, sizes: Ints) -> Ints:
        """Return how many parts objects of these sizes (in bytes) have, at least one each."""
        if self.whole:
            return np.ones(len(sizes), np.int64)
        samples = np.floor((sizes - self.overhead_bytes) / self.stride_bytes + 1e-9)
        parts: Ints = np.maximum(1, -(-samples // self.samples_per_object)).astype(np.int64)
        return parts

    def samples(self, sizes: Ints) -> float:
        """Estimate the samples of objects of these sizes (in bytes)."""
        if self.whole:
            return len(sizes) * self.samples_per_whole
        samples = (sizes - self.overhead_bytes) / self.stride_bytes
        return float(np.maximum(0, np.floor(samples + 1e-9)).sum())
