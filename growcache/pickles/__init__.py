"""Read pickles of arrays from untrusted sources without running their code.

`opcodes` interprets a pickle on a machine of its own, and `makers` lists everything that a
pickle may name. Python's unpickler is not used. It restores arrays and dtypes by NumPy code
that trusts the pickle, lets 20 bytes claim gigabytes, and hashes any object.
"""

from __future__ import annotations

from growcache.pickles.opcodes import interpret

__all__ = ["unpickle_arrays"]


def unpickle_arrays(data: bytes | bytearray | memoryview) -> object:
    """Return the arrays and containers of a pickle, without running any of its code.

    Containers are Python's dicts, lists, tuples, sets, OrderedDicts and defaultdicts. They may
    hold arrays and scalars of NumPy 1 or 2, numbers, text, bytes and None. Arrays may have
    numbers, bool, dates, fixed-length text, or records of these. All protocols are read, also
    those of Python 2. Bytes after the end of the pickle are ignored, as by `pickle.loads`. The
    length of ``data`` bounds memory and time.

    Args:
        data: Bytes that `pickle.dumps` made.

    Returns:
        The pickled value.

    Raises:
        FormatError: The pickle needs another class or function, which the message names, or is
            damaged, or ``data`` is not a pickle.

    >>> import pickle
    >>> unpickle_arrays(pickle.dumps({"x": [1, 2.5, None]}))
    {'x': [1, 2.5, None]}
    """
    return interpret(bytes(data))
