"""Windows with lengths in seconds, such as 2s or 500ms."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from growcache.errors import ConfigError, FormatError
from growcache.formats.grids import ArrayGrid, array_grid_option

_DURATION = re.compile(r"([0-9]+(?:\.[0-9]*)?) ?(ms|s)")
_LENGTHS = ("window", "stride")
_GRID = (*_LENGTHS, "edge", "phase")


def seconds_of(value: str) -> float | None:
    """Return a duration in seconds, or None if the text is not a duration.

    >>> seconds_of("2s"), seconds_of("20ms"), seconds_of("2 m")
    (2.0, 0.02, None)
    """
    found = _DURATION.fullmatch(value)
    return float(found[1]) / (1000 if found[2] == "ms" else 1) if found else None


class TimeGrid:
    """Windows along the time axis: in samples, or in seconds at an object's rate."""

    def __init__(self, options: Mapping[str, Any], axis: int) -> None:
        self._options = {name: options[name] for name in _GRID if name in options}
        self._axis = axis
        self._seconds = {
            name: self._seconds_option(name)
            for name in _LENGTHS
            if isinstance(options.get(name), str)
        }
        self._grids: dict[float, ArrayGrid] = {}
        self._made = self._grid(dict.fromkeys(self._seconds, 1))  # refuses wrong options

    @property
    def needs_rate(self) -> bool:
        return bool(self._seconds)

    def at(self, rate: float, key: str) -> ArrayGrid:
        """Return the grid for a rate in samples per second."""
        if not self._seconds:
            return self._made
        found = self._grids.get(rate)
        if found is None:
            self._grids.clear()
            found = self._grids[rate] = self._grid(
                {name: self._samples(name, rate, key) for name in self._seconds}
            )
        return found

    def _grid(self, lengths: Mapping[str, int]) -> ArrayGrid:
        return array_grid_option({**self._options, **lengths, "axis": self._axis}, "zero")

    def _seconds_option(self, name: str) -> float:
        value = self._options[name]
        seconds = seconds_of(value)
        if not seconds:
            raise ConfigError(
                f"source.options.{name}: expected a number of samples, or a time, as in 2s or 500ms, "
                f"found {value!r}"
            )
        return seconds

    def _samples(self, name: str, rate: float, key: str) -> int:
        samples = round(self._seconds[name] * rate)
        if samples < 1:
            raise FormatError(
                f"{key}: {name} {self._options[name]} is less than a sample, of {rate:g} a second",
                code="GC303",
            )
        return samples
