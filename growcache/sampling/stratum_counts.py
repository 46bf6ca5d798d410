"""The draws of each stratum, as the status shows them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from growcache.cache.status_model import StratumStatus
from growcache.sampling.orders import Floats, Ints
from growcache.usercode import printable

MOST_ROWS = 50  # strata with the fewest draws share the last one
MOST_CHARACTERS = 100  # of a name


def stratum_statuses(
    names: Sequence[str], parts: Ints, drawn: Ints, *, replacement: bool
) -> list[StratumStatus]:
    """Return a row per stratum, most drawn first.

    ``parts`` and ``drawn`` are in the order of the names.

    >>> rows = stratum_statuses(["a", "b"], np.array([10, 2]), np.array([4, 5]), replacement=False)
    >>> [(row.name, row.parts, row.drawn, row.coverage) for row in rows]
    [('b', 2, 5, 1.0), ('a', 10, 4, 0.4)]
    """
    distinct = _distinct(parts, drawn, replacement=replacement)
    order = np.argsort(-drawn, kind="stable")
    shown = order if len(order) <= MOST_ROWS else order[: MOST_ROWS - 1]
    rows = [
        StratumStatus(
            printable(names[at])[:MOST_CHARACTERS],
            int(parts[at]),
            int(drawn[at]),
            _share(distinct[at], parts[at]),
        )
        for at in shown.tolist()
    ]
    if len(rest := order[len(shown) :]):
        sums = [float(column[rest].sum()) for column in (distinct, parts)]
        counts = int(parts[rest].sum()), int(drawn[rest].sum())
        rows.append(StratumStatus("", *counts, _share(*sums), strata=len(rest)))
    return rows


def _distinct(parts: Ints, drawn: Ints, *, replacement: bool) -> Floats:
    """Return the number of different parts in the draws; with replacement the expected number."""
    if not replacement:
        return np.minimum(drawn, parts).astype(np.float64)
    expected: Floats = -parts.astype(np.float64) * np.expm1(-drawn / np.maximum(parts, 1))
    return expected


def _share(distinct: float, parts: float) -> float:
    return float(distinct / parts) if parts else 0.0
