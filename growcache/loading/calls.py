"""Calls of the user's functions: an exception keeps its type, and says whose it is."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
