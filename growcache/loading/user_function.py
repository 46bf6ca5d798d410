"""The user's `transform` and `batch_transform`: arguments, pickles, errors, and calls that take too long."""

from __future__ import annotations

import inspect
import pickle
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

from growcache.errors import CacheError, ConfigError, GrowcacheError

LOADING_DIR = Path(__file__).parent


@contextmanager
def blame_function(what: str, function: Callable[..., Any], on: str = "") -> Iterator[None]:
    """Add a note to errors of the user's function: its name and line."""
    try:
        yield
    except BaseException as error:
        error.add_note(
            f"in {what} {_function_name(function)}{_function_line(error, function)}{on and f', on {on}'}"
        )
        raise


def portable_error(error: BaseException, where: str) -> BaseException:
    """Return an error that another process can raise, with a note of where it happened."""
    if not isinstance(error, GrowcacheError):
        error.add_note(f"in {where}:\n{''.join(traceback.format_exception(error)).rstrip()}")
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - whatever such a class does when it is pickled
        notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
        return CacheError(f"{type(error).__name__}: {error}{notes}")
    return error


def _function_name(function: Callable[..., Any]) -> str:
    found = getattr(function, "__qualname__", None)
    return found if isinstance(found, str) else type(function).__qualname__


def _function_line(error: BaseException, function: Callable[..., Any]) -> str:
    """Return the innermost line of the user's own file, or of any outside of the loader."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if Path(frame.filename).parent != LOADING_DIR]
    own = [frame for frame in theirs if frame.filename == _function_file(function)]
    return "".join(f" ({frame.filename}:{frame.lineno})" for frame in (own or theirs)[-1:])


def _function_file(function: Callable[..., Any]) -> str | None:
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None) or getattr(
        type(function).__call__, "__code__", None
    )
    return code.co_filename if code is not None else None


@dataclass(frozen=True, slots=True)
class PickledFunction:
    """A function as bytes; a process that only forwards it need not be able to import it."""

    code: bytes
    takes: frozenset[str]

    def load(self) -> Callable[..., Any]:
        """Return the function; ConfigError where its module cannot be imported."""
        function: Callable[..., Any] = pickle.loads(self.code)
        return function


# The user's function, or its pickle, which is not called.
UserFunction: TypeAlias = Callable[..., Any] | PickledFunction


def pickle_function(function: UserFunction, takes: frozenset[str]) -> PickledFunction:
    """Return the function pickled: by name, or by value from scripts and notebooks."""
    import cloudpickle  # here, because only workers need it

    if isinstance(function, PickledFunction):
        return function
    try:
        return PickledFunction(cloudpickle.dumps(function), takes)
    except Exception as error:  # whatever a part of it does when it is pickled
        raise ConfigError(
            f"transform cannot be sent to the processes of num_workers: {type(error).__name__}: "
            f"{error}; leave out what cannot be pickled, or use num_workers=0"
        ) from error


TIMEOUT_SECONDS = 60.0
MAX_TIMEOUT_SECONDS = 1e7

V = TypeVar("V")


class SlowCallWatch(Generic[V]):
    """Warns about long calls of some threads; used by one thread.

    A call is reported after ``timeout_seconds``, and again each time that has doubled.
    """

    def __init__(self, timeout_seconds: float, tell: Callable[[V, float], object]) -> None:
        self.pause_seconds = min(1.0, timeout_seconds / 4)
        self._timeout_seconds = timeout_seconds
        self.tell = tell
        self._told: dict[int, tuple[float, float]] = {}  # when the call began, warned of next

    def look(self, calls: Mapping[int, tuple[V, float]], now: float) -> None:
        for thread, (call, began) in calls.items():
            since, limit = self._told.get(thread, (began, self._timeout_seconds))
            if since != began:
                limit = self._timeout_seconds
            if now - began >= limit:
                self.tell(call, now - began)
                limit *= 2
            self._told[thread] = began, limit


NAMED_ARGUMENTS = ("rng", "origin")


def function_arguments(function: UserFunction) -> frozenset[str]:
    """Return which of ``rng`` and ``origin`` the function takes besides the sample."""
    if isinstance(function, PickledFunction):
        return function.takes
    if not callable(function):
        raise ConfigError(f"transform must be a function itself, found {function!r}")
    parameters = list(inspect.signature(function).parameters.values())
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    names = {
        p.name for p in parameters[1:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    required = {p.name for p in parameters[1:] if p.default is p.empty and p.name in names}
    if not parameters or required - set(NAMED_ARGUMENTS):
        raise ConfigError(
            "transform expected as function(sample, rng, origin), of which rng and origin "
            f"may be left out; found {inspect.signature(function)}"
        )
    return frozenset(NAMED_ARGUMENTS if takes_any else names & set(NAMED_ARGUMENTS))
