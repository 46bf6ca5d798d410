"""Pickled bytes of strangers, read without running anything of theirs.

`steps` follow a pickle's instructions on objects of their own making, `makers` is the whole
list of what a pickle may ask for by name. Python's own unpickler is not used: it gives arrays
and dtypes their state by code of NumPy's that trusts it, lets a pickle of 20 bytes claim
gigabytes, and hashes whatever it is told to.
"""

from __future__ import annotations

from growcache.pickles.follow import follow

__all__ = ["unpickle_arrays"]


def unpickle_arrays(data: bytes | bytearray | memoryview) -> object:
    """Return what was pickled, where that is arrays and containers; nothing of it is run.

    Arrays and scalars of NumPy (1 or 2; numbers, bool, dates, fixed text, records of these) in
    dicts, lists, tuples, sets, OrderedDicts and defaultdicts of Python's own, beside numbers,
    text, bytes and None: of every protocol, Python 2's included. What stands behind the
    pickle is ignored, as by `pickle.loads`. Memory and time are bounded by the length of ``data``.

    Args:
        data: as `pickle.dumps` made it.

    Raises:
        FormatError: it needs a class or function beyond these, which the message names, or
            is no pickle, or a damaged one.

    >>> import pickle
    >>> unpickle_arrays(pickle.dumps({"x": [1, 2.5, None]}))
    {'x': [1, 2.5, None]}
    """
    return follow(bytes(data))
