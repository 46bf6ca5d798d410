"""A function for configs that turns the pickled values of an LMDB file into samples.

Each value is a pickled dict with the arrays ``fingerprint`` and ``target``. growcache finds
``"points:decode"`` if Python finds the module: next to the script, in the working directory, or
among the installed packages. It runs in the sampler processes, in several threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import growcache


def decode(data: bytes, key: bytes) -> dict[str, Any] | None:
    """``source.options.decode: "points:decode"``: return the sample of a value.

    Args:
        data: the value.
        key: its key. Many files have a key for the number of values. None leaves it out.
    """
    if key == b"length":
        return None
    # Not pickle.loads, because that runs any code in the pickle. Instances of your own classes need
    # pickle.loads. Use it only if you trust everyone with write access to the bucket.
    point: Any = growcache.unpickle_arrays(data)
    return {
        "x": np.asarray(point["fingerprint"], np.float32),
        "y": np.float32(point["target"]),
        "key": key.decode(),
    }
