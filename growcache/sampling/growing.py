"""An array that grows at its end, at a constant cost per value."""

from __future__ import annotations

from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

Kind = TypeVar("Kind", bound=np.generic)


class Growing(Generic[Kind]):
    """Values of one dtype; views that were handed out before stay as they were.

    >>> numbers = Growing(np.dtype(np.int64))
    >>> for n in range(3):
    ...     numbers.extend(np.array([n, n]))
    >>> numbers.values.tolist()
    [0, 0, 1, 1, 2, 2]
    """

    def __init__(self, dtype: np.dtype[Kind]) -> None:
        self._room = np.zeros(64, dtype)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def values(self) -> npt.NDArray[Kind]:
        """The values of this moment, as a view."""
        return self._room[: self._count]

    def extend(self, values: npt.NDArray[Kind]) -> None:
        """Add values at the end."""
        count = self._count + len(values)
        if count > len(self._room):
            grown = np.zeros(max(count, 2 * len(self._room)), self._room.dtype)
            grown[: self._count] = self.values
            self._room = grown
        self._room[self._count : count] = values
        self._count = count
