"""From the pickled values of an LMDB file to samples, in a function that configs name.

Each value is a pickled dict with the arrays ``fingerprint`` and ``target``. growcache finds
``"points:decode"`` where Python finds the module: next to the script, in the working
directory, or in what is installed. It runs in the sampler processes, in several threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import growcache


def decode(data: bytes, key: bytes) -> dict[str, Any] | None:
    """``source.options.decode: "points:decode"``: what is cached of a value.

    Args:
        data: the value.
        key: its key. Many files have one that counts the others: None leaves it out.
    """
    if key == b"length":
        return None
    # Not pickle.loads, which runs whatever the writer of the object wanted. It is what instances of
    # your own classes need, if you trust whoever may write to the bucket.
    point: Any = growcache.unpickle_arrays(data)
    return {
        "x": np.asarray(point["fingerprint"], np.float32),
        "y": np.float32(point["target"]),
        "key": key.decode(),
    }
