"""Which subset an object belongs to: a hash of its group, so that no group is in two of them."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from growcache.config import LabelGroup, SplitConfig
from growcache.errors import ConfigError
from growcache.seeding import derive
from growcache.usercode import short

NONE = -1  # of an object that belongs to no subset


class Subsets:
    """Assigns groups to the subsets of a split; the same group always to the same one.

    Args:
        split: of the configuration.

    Attributes:
        names: of the subsets.
        used: the number of the one that is drawn from.
        label: by which objects are grouped; None: by their keys.
    """

    def __init__(self, split: SplitConfig) -> None:
        self.names = tuple(split.fractions)
        self.used = self.names.index(split.use)
        self._seed = split.seed
        self.label = split.group.label if isinstance(split.group, LabelGroup) else None
        self._group = re.compile(split.group) if isinstance(split.group, str) else None
        # The last bound is 1 where nothing shall be left out, whatever the rounding.
        bounds = np.cumsum(list(split.fractions.values()))
        self._bounds = [1.0 if bound > 1 - 1e-9 else float(bound) for bound in bounds]
        self._last: tuple[str, int] = ("", NONE)

    def groups(self, keys: Sequence[str]) -> list[str]:
        """Return the group of each key; without ``split.group`` each is one by itself.

        Raises:
            ConfigError: ``split.group`` does not match a key.
        """
        return [self._group_of(key) for key in keys] if self._group else list(keys)

    def places(self, groups: Sequence[str]) -> npt.NDArray[np.int8]:
        """Return the number of each group's subset in `names`, `NONE` for none."""
        return np.fromiter(map(self._place, groups), np.int8, len(groups))

    def _group_of(self, key: str) -> str:
        assert self._group is not None
        match = self._group.search(key)
        if match is None or not match["group"]:
            raise ConfigError(
                f"split.group: expected {self._group.pattern} to match every key, found "
                f"{short(key)}; mend it, or narrow source.url"
            )
        return match["group"]

    def _place(self, group: str) -> int:
        if group != self._last[0]:  # keys of one group mostly follow one another
            # 53 bits, as many as a float holds: uniform over [0, 1).
            share = (derive("split", self._seed, group) >> 75) / (1 << 53)
            found = (n for n, bound in enumerate(self._bounds) if share < bound)
            self._last = (group, next(found, NONE))
        return self._last[1]
