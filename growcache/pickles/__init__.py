"""Read pickles of arrays from untrusted sources without running their code.

`opcodes` interprets a pickle on a machine of its own, and `makers` lists everything that a
pickle may name. Python's unpickler is not used because it gives arrays and dtypes their state
by NumPy code that trusts the pickle, lets 20 bytes claim gigabytes, and hashes any object.
"""

from __future__ import annotations

from growcache.pickles.opcodes import interpret

__all__ = ["unpickle_arrays"]


def unpickle_arrays(data: bytes | bytearray | memoryview) -> object:
    """Return what was pickled, where that is arrays and containers; nothing of it is run.

    Arrays and scalars of NumPy (1 or 2; numbers, bool, dates, fixed text, records of these) in
    dicts, lists, tuples, sets, OrderedDicts and defaultdicts of Python's own, and numbers,
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
    return interpret(bytes(data))
