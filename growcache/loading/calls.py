"""Calls of the user's functions: an exception keeps its type, and says whose it is."""

from __future__ import annotations

import inspect
import pickle
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from growcache.errors import CacheError, GrowcacheError

HERE = Path(__file__).parent


@contextmanager
def blamed(what: str, function: Callable[..., Any], on: str = "") -> Iterator[None]:
    """Note on what is raised inside that it comes out of the user's function, and where.

    Args:
        what: the argument that the function was given as.
        function: the user's.
        on: what it was called with.
    """
    try:
        yield
    except BaseException as error:
        error.add_note(
            f"in {what} {_name(function)}{_line(error, function)}{on and f', on {on}'}"
        )
        raise


def portable(error: BaseException, where: str) -> BaseException:
    """Return an error as another process can raise it, with a note of where it happened.

    Args:
        error: that was raised here.
        where: this process, in words.
    """
    if not isinstance(error, GrowcacheError):
        error.add_note(f"in {where}:\n{''.join(traceback.format_exception(error)).rstrip()}")
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - whatever such a class does when it is pickled
        notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
        return CacheError(f"{type(error).__name__}: {error}{notes}")
    return error


def _name(function: Callable[..., Any]) -> str:
    found = getattr(function, "__qualname__", None)
    return found if isinstance(found, str) else type(function).__qualname__


def _line(error: BaseException, function: Callable[..., Any]) -> str:
    """Return the innermost line of the user's own file, or of any that is not the loader's."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if Path(frame.filename).parent != HERE]
    own = [frame for frame in theirs if frame.filename == _file(function)]
    return "".join(f" ({frame.filename}:{frame.lineno})" for frame in (own or theirs)[-1:])


def _file(function: Callable[..., Any]) -> str | None:
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None) or getattr(
        type(function).__call__, "__code__", None
    )
    return code.co_filename if code is not None else None
