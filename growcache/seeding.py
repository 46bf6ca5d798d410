"""Randomness as a function of the seed and a place, without a generator's state."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

Uint64Array = npt.NDArray[np.uint64]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio: SplitMix64's step


def derive_seed(*where: int | str) -> int:
    """Return 128 well-mixed bits that depend on every element of ``where``, in order.

    >>> derive_seed(0, "pass", 1) == derive_seed(0, "pass", 1)
    True
    >>> derive_seed(0, 1) == derive_seed(1, 0) or derive_seed(0, "1") == derive_seed(0, 1)
    False
    """
    text = "\x1f".join(f"{type(part).__name__[0]}{part}" for part in where)
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16)
    return int.from_bytes(digest.digest(), "little")


def generator_at(*where: int | str) -> np.random.Generator:
    """Return a new NumPy generator for the place ``where`` (see `derive_seed`)."""
    return np.random.Generator(np.random.PCG64(derive_seed(*where)))


def hash64(text: str) -> int:
    """Return 64 well-mixed bits of a text."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def stream64(seeds: Uint64Array, positions: Uint64Array) -> Uint64Array:
    """Return the numbers at these positions of SplitMix64's sequences with these seeds.

    Steele, Lea & Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.

    >>> hex(stream64(np.zeros(1, np.uint64), np.zeros(1, np.uint64))[0])
    '0xe220a8397b1dcdaf'
    """
    return finalize64(seeds + (positions + np.uint64(1)) * GOLDEN)


def finalize64(words: Uint64Array) -> Uint64Array:
    """Apply SplitMix64's finalizer to each word: a bijection that mixes all 64 bits."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Uint64Array = words ^ (words >> np.uint64(31))
    return mixed
