"""Guess the dtype of numbers without a header from the statistics of their bytes.

The high bytes of numbers differ less from number to number than the low bytes.
"""

from __future__ import annotations

import numpy as np

from growcache.schema import Array

RAW_SUFFIXES = (".dat", ".bin", ".raw", ".img", ".bytes")
MIN_BYTES = 4096  # needed for a guess
_PLAUSIBLE = (1e-12, 1e12)  # magnitudes of measured floats
_PLAUSIBLE_SHARE = 0.99
_CLEAR_BITS = 0.5  # if the entropies of two bytes differ by less, they count as equal
# Bits per byte. Bytes with more are compressed or encrypted.
_LEAST_ENTROPY, _MOST_ENTROPY = 0.01, 7.9


def guess_dtype(data: bytes) -> str:
    """Return a plausible dtype, or "".

    >>> guess_dtype(np.sin(np.arange(4000)).astype(">f4").tobytes())
    '>f4'
    """
    if len(data) < MIN_BYTES:
        return ""
    data = data[: len(data) // 8 * 8]
    for dtype in ("<f4", ">f4", "<f8", ">f8"):
        if _are_plausible_floats(np.frombuffer(data, dtype)):
            return dtype
    return _guess_integers(np.frombuffer(data, np.uint8).reshape(-1, 4))


def _are_plausible_floats(values: Array) -> bool:
    with np.errstate(invalid="ignore", over="ignore"):
        sizes = np.abs(values.astype("f8"))
    low, high = _PLAUSIBLE
    is_plausible = (sizes == 0) | ((sizes > low) & (sizes < high)) | np.isnan(values)
    is_measured = (sizes > low).mean() > 0.5 and np.isfinite(values).mean() > 0.5
    return bool(is_measured and is_plausible.mean() >= _PLAUSIBLE_SHARE)


def _guess_integers(rows: Array) -> str:
    bits = [_entropy(rows[:, at]) for at in range(4)]
    if not _LEAST_ENTROPY < np.mean(bits) < _MOST_ENTROPY:
        return ""
    for order, (top, upper, lower) in (("<", (3, 2, 0)), (">", (0, 1, 3))):
        is_sign = np.isin(rows[:, top], (0, 255)).mean() > _PLAUSIBLE_SHARE
        if is_sign and bits[top] + 1 < bits[lower] and bits[upper] + 1 < bits[lower]:
            return f"{order}i4"
    even, odd = (bits[0] + bits[2]) / 2, (bits[1] + bits[3]) / 2
    if abs(even - odd) < _CLEAR_BITS:
        return "|u1"
    return "<i2" if odd < even else ">i2"


def _entropy(values: Array) -> float:
    shares = np.bincount(values, minlength=256) / len(values)
    used = shares[shares > 0]
    return float(-(used * np.log2(used)).sum())
