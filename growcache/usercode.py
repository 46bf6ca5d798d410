"""The user's own code: imported by name, called by keyword, and named with file and line in errors.

Child processes start as ``python -m growcache …``, never by fork, with an environment in which
they can import the same code.
"""

from __future__ import annotations

import ast
import difflib
import functools
import hashlib
import importlib
import inspect
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from growcache.errors import ConfigError, FormatError, GrowcacheError
from growcache.schema import Origin, Sample

# Characters of an object's key in a reason; the hole has the whole key.
_MAX_KEY_CHARACTERS = 80
_MAX_ERROR_CHARACTERS = 160  # of an exception's text
_MAX_ADVICE_CHARACTERS = 500  # of growcache's own errors, which say what to do


MOST_STUCK = 32  # calls; with more of them, a restart of the sampler is better


class RunningCalls:
    """The running calls of the user's code, by thread, and the number of ended calls."""

    def __init__(self) -> None:
        self.ended = 0
        self._running: dict[int, tuple[float, UserCode, str, Origin | None]] = {}

    def begin(self, code: UserCode, key: str, origin: Origin | None = None) -> None:
        """Record that this thread calls the code for an object, or for one of its samples."""
        self._running[threading.get_ident()] = (time.monotonic(), code, key, origin)

    def end(self) -> None:
        """Record that this thread's call ended."""
        del self._running[threading.get_ident()]
        self.ended += 1  # losing a count is harmless, because others follow

    def give_up(self, seconds: float) -> None:
        """Count a call of ``seconds`` or more as ended, which is progress.

        Calls are not counted if too many threads are stuck.
        """
        now = time.monotonic()
        stuck = sum(now - call[0] >= seconds for call in list(self._running.values()))
        if stuck <= MOST_STUCK:
            self.ended += 1

    def longest(self) -> tuple[float, str] | None:
        """Return the seconds and the description of the longest running call."""
        running = list(self._running.values())
        if not running:
            return None
        began, code, key, origin = min(running, key=lambda call: call[0])
        part = "" if origin is None else f" [{origin.start}:{origin.stop}]"
        return time.monotonic() - began, f"{code.role} {code.name} on {short_key(key)}{part}"


RUNNING_CALLS = RunningCalls()


class CodeDigest(NamedTuple):
    """Digests of the modules that hold the user's code."""

    syntax: str  # of the syntax tree, which comments and docstrings do not change
    text: str  # of the files' text, as in old caches

    @classmethod
    def combined(cls, digests: Sequence[CodeDigest | None]) -> CodeDigest | None:
        """Return one digest of several, or None if no code of the user runs."""
        if not any(digests):
            return None
        return cls(
            *(
                hashlib.sha256(
                    "\n".join(each[kind] if each else "" for each in digests).encode()
                ).hexdigest()
                for kind in (0, 1)
            )
        )


# Exceptions of the user's code must not end the sampler, including these besides Exception.
_USER_ERRORS = (Exception, SystemExit)


@dataclass(frozen=True, slots=True)
class UserCode:
    """A function of the user, with its options bound."""

    name: str  # package.module:function
    role: str  # configuration key that names it
    digest: CodeDigest  # of its module
    source_root: str  # its file, or the folder of its package
    function: Callable[..., Any]
    parameters: tuple[str, ...]  # besides its options, in its own order

    def __call__(self, key: str, values: Mapping[str, Any]) -> Any:
        """Return the function's result for an object. ``values`` has all known parameters."""
        RUNNING_CALLS.begin(self, key, values.get("origin"))
        try:
            return self.function(**{name: values[name] for name in self.parameters})
        except _USER_ERRORS as error:
            raise self.failure(key, error) from error
        finally:
            RUNNING_CALLS.end()

    def items(self, key: str, result: Iterable[Any]) -> Iterator[Any]:
        """Yield the items of a user's generator or list.

        Raises:
            FormatError: The generator raised.
        """
        found: Iterator[Any] | None = None
        while True:
            RUNNING_CALLS.begin(self, key)
            try:
                found = found or iter(result)
                item = next(found)
            except StopIteration:
                return
            except _USER_ERRORS as error:
                raise self.failure(key, error) from error
            finally:
                RUNNING_CALLS.end()
            yield item

    def failure(self, key: str, error: BaseException) -> FormatError:
        """Return the error for a call that raised. Its sample becomes a hole."""
        what = f"raised {_error_text(error)} at {_user_line(error, self.source_root)}"
        return FormatError(f"{self.name} {what} on {short_key(key)}", code="GC309")

    def sample(self, key: str, result: object, given: Iterable[Any] = ()) -> Sample:
        """Return the function's result as a sample.

        Arrays in ``given`` were made for this call and are not copied.
        """
        source = f"{self.name} on {short_key(key)}"
        if not isinstance(result, Mapping) or not result:
            found = "an empty one" if isinstance(result, Mapping) else type(result).__name__
            raise FormatError(
                f"{source}: expected a dict of arrays, found {found}", code="GC309"
            )
        for name in result:
            if not isinstance(name, str) or not name:
                raise FormatError(
                    f"{source}: expected a str as name of an array, found {name!r}",
                    code="GC309",
                )
        fresh = set(map(id, given))
        return {
            name: _sample_value(value, source, name, fresh) for name, value in result.items()
        }


def load_code(
    name: str, options: Mapping[str, Any], known: tuple[str, ...], where: tuple[str, str]
) -> UserCode:
    """Return the code with the name ``package.module:function``.

    ``known`` has the parameters for which growcache has values. ``where`` has the configuration
    keys of name and options, for errors.
    """
    key = where[0]
    found, digest, root = find_code(name, key)
    if isinstance(found, type):
        function = _instantiate(found, options, name, where)
        options = {}
    else:
        function = found
    if not callable(function):
        raise ConfigError(f"{key}: {name} is not callable", code="GC107")
    parameters = _parameters(function, options, known, name, where)
    bound = functools.partial(function, **options) if options else function
    return UserCode(name, key, digest, root, bound, parameters)


class FoundCode(NamedTuple):
    """The object with a name ``package.module:attribute``."""

    found: Any
    digest: CodeDigest  # of its module
    source_root: str


# Code that this process received in a message, because a Ray node may lack the user's modules.
SENT_CODE: dict[str, FoundCode] = {}


def find_code(name: str, key: str) -> FoundCode:
    """Import ``package.module:attribute``. ``key`` is the configuration key of the name."""
    if name in SENT_CODE:
        return SENT_CODE[name]
    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute:
        raise ConfigError(
            f"{key}: expected package.module:function, found {name!r}", code="GC107"
        )
    module = _import_module(module_name, name, key)
    found = _get_attribute(module, attribute, name, key)
    return FoundCode(found, _source_digest(module), _source_root(module))


# Module part of the name of a maker that a program passed; it cannot be imported.
PICKLED = "pickled"
# Names its file; the underscore marks that it is no setting.
PICKLED_PATH = "_GROWCACHE_DATASET_PICKLE"


@dataclass(frozen=True, slots=True)
class Maker:
    """A callable that makes a Dataset, or the Dataset itself."""

    name: str  # package.module:function
    digest: CodeDigest | None  # of its module; None for an instance, which has only a name
    source_root: str
    made: Callable[[], Any]

    def make(self) -> Any:
        """Return the Dataset.

        Raises:
            ConfigError: The user's code raised; the message has its line.
        """
        try:
            return self.made()
        except _USER_ERRORS as error:
            line = _user_line(error, self.source_root)
            raise ConfigError(
                f"source.dataset: {self.name} raised {_error_text(error)} at {line}",
                code="GC114",
            ) from error


def load_maker(name: str, options: Mapping[str, Any], where: tuple[str, str]) -> Maker:
    """Return the function, class or instance with the name ``package.module:name``.

    See `load_code` for ``where``.
    """
    key = where[0]
    if name.partition(":")[0] == PICKLED:
        return _unpickled(name, key)
    code = find_code(name, key)
    made = maker_of(code.found, options, name, where)
    return Maker(name, code.digest, code.source_root, made)


def maker_of(
    found: Any, options: Mapping[str, Any], name: str, where: tuple[str, str]
) -> Callable[[], Any]:
    """Return a function without arguments that makes the Dataset."""
    if is_dataset(found) or not callable(found):
        if options:
            raise ConfigError(
                f"{where[1]}: {name} is not a function, and takes no options", code="GC108"
            )
        return lambda: found
    try:
        inspect.signature(found).bind(**options)
    except TypeError as error:
        raise ConfigError(f"{where[1]} do not fit {name}: {error}", code="GC108") from None
    except ValueError:  # some builtins have no signature
        pass
    return functools.partial(found, **options)


def is_dataset(found: Any) -> bool:
    """Whether the object is a Dataset or a sequence, rather than a callable that makes one."""
    return not isinstance(found, type) and hasattr(found, "__getitem__")


def _unpickled(name: str, key: str) -> Maker:
    path = os.environ.get(PICKLED_PATH)
    if path is None:
        raise ConfigError(
            f"{key}: {name.partition(':')[2]} was given to from_dataset by a program, so only that "
            "program can draw from it; give from_dataset a function of a module instead",
            code="GC109",
        )
    # The program's own pickle, in a file that only this user can write.
    try:
        held = pickle.loads(Path(path).read_bytes())
    except _USER_ERRORS as error:
        raise ConfigError(
            f"{key}: {name} cannot be unpickled in a growcache process: {_error_text(error)}; "
            "give from_dataset a function that makes the Dataset",
            code="GC109",
        ) from error
    digest = CodeDigest(*held["digest"]) if held["digest"] else None
    found = held["found"]
    return Maker(name, digest, held["root"], found if held["makes"] else lambda: found)


def short_key(key: str) -> str:
    """Return the printable end of an object's key, for a message."""
    return printable(
        key if len(key) <= _MAX_KEY_CHARACTERS else "…" + key[1 - _MAX_KEY_CHARACTERS :]
    )


def printable(text: str) -> str:
    r"""Return the text with escapes for characters that a terminal would interpret or cannot show.

    >>> printable("caf\u00e9 \x1b[31m\udcff")
    'café \\x1b[31m\\udcff'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _import_module(module_name: str, name: str, key: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except _USER_ERRORS as error:
        hint = ""
        if isinstance(error, ModuleNotFoundError) and error.name == module_name.split(".")[0]:
            hint = f"; looked for in {Path.cwd()}, PYTHONPATH and the installed packages"
        elif error.__traceback__ is not None and not isinstance(error, SyntaxError):
            hint = f" (at {_user_line(error, '')})"
        raise ConfigError(
            f"{key}: cannot load {name}: {_error_text(error)}{hint}", code="GC107"
        ) from error


def _get_attribute(module: ModuleType, attribute: str, name: str, key: str) -> Any:
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            close = difflib.get_close_matches(part, dir(found), n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ConfigError(
                f"{key}: cannot load {name}: {module.__name__} has no {part}{hint}",
                code="GC107",
            )
        found = getattr(found, part)
    return found


def _instantiate(
    kind: Callable[..., Any], options: Mapping[str, Any], name: str, where: tuple[str, str]
) -> Any:
    try:
        return kind(**options)
    except _USER_ERRORS as error:
        raise ConfigError(
            f"{where[1]} do not fit {name}: {_error_text(error)}", code="GC108"
        ) from error


def _parameters(
    function: Callable[..., Any],
    options: Mapping[str, Any],
    known: tuple[str, ...],
    name: str,
    where: tuple[str, str],
) -> tuple[str, ...]:
    key, options_key = where
    try:
        declared = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some builtins have no signature
        raise ConfigError(
            f"{key}: {name} has no signature that shows its parameters; wrap it in a function",
            code="GC108",
        ) from None
    takes_any = any(p.kind is p.VAR_KEYWORD for p in declared.values())
    for option in options:
        if option in known or not (takes_any or option in declared):
            names = [n for n in declared if n not in known]
            close = difflib.get_close_matches(str(option), names, n=1)
            hint = (
                f"; did you mean {close[0]}?" if close else f"; it takes {_join_names(names)}"
            )
            raise ConfigError(
                f"{options_key}: {name} takes no option {option!r}{hint}", code="GC108"
            )
    missing = [
        p.name
        for p in declared.values()
        if p.name not in known
        and p.name not in options
        and p.default is p.empty
        and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    positional = [p.name for p in declared.values() if p.kind is p.POSITIONAL_ONLY]
    if missing or positional:
        raise ConfigError(
            f"{key}: {name} may take {_join_names(list(known))} by name, and options; found "
            f"({', '.join(declared)}), of which {_join_names(missing or positional)} cannot be given",
            code="GC108",
        )
    return tuple(n for n in declared if n in known)


def _join_names(names: list[str]) -> str:
    return ", ".join(names) or "none"


def _source_digest(module: ModuleType) -> CodeDigest:
    path = module.__file__
    return source_digest(Path(path).read_bytes() if path else b"")


def source_digest(source: bytes) -> CodeDigest:
    """Return the digests of the source of a module or function."""
    return CodeDigest(_digest(syntax_of(source)), _digest(source))


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def syntax_of(source: bytes) -> bytes:
    """Return the syntax tree as text, or the source itself if it is not Python.

    Docstrings are left out unless the code may read one. Empty fields are left out, because new
    versions of Python add them and `ast.dump` shows some of them.

    >>> syntax_of(b"def f(x): 'About.'; return x  # so") == syntax_of(b"def f(x): return x")
    True
    >>> syntax_of(b"x = 1") == syntax_of(b"x = 2")
    False
    >>> syntax_of(b"'1'; x = __doc__") == syntax_of(b"'2'; x = __doc__")
    False
    """
    try:
        tree = ast.parse(source)
        text = repr(_shape_of(tree, docstrings=False))
        if any(word in text for word in _READING_DOCSTRINGS):
            text = repr(_shape_of(tree, docstrings=True))
        return text.encode("utf-8", "backslashreplace")
    except (SyntaxError, ValueError, RecursionError):  # such as for a compiled module
        return source


def _shape_of(node: Any, *, docstrings: bool) -> Any:
    if isinstance(node, list):
        return [_shape_of(item, docstrings=docstrings) for item in node]
    if not isinstance(node, ast.AST):
        return node
    fields = {name: value for name, value in ast.iter_fields(node) if name != "kind"}
    if not docstrings and isinstance(node, _WITH_DOCSTRINGS):
        fields["body"] = fields["body"][ast.get_docstring(node, clean=False) is not None :]
    shown = {
        name: _shape_of(value, docstrings=docstrings)
        for name, value in fields.items()
        if value not in (None, [])
    }
    return (type(node).__name__, *shown.items())


_READING_DOCSTRINGS = ("__doc__", "getdoc")
_WITH_DOCSTRINGS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def _source_root(module: ModuleType) -> str:
    top, dot, _ = module.__name__.partition(".")
    package = sys.modules.get(top)
    paths = list(getattr(package, "__path__", ())) if dot else []
    return str(paths[0]) if paths else (module.__file__ or "")


def _user_line(error: BaseException, root: str) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if root and Path(frame.filename).is_relative_to(root)]
    frame = (own or frames)[-1]
    shown = Path(frame.filename)
    if root and own and shown != Path(root):
        shown = shown.relative_to(Path(root).parent)
    else:
        shown = Path(shown.name)
    return f"{shown}:{frame.lineno}"


def _error_text(error: BaseException) -> str:
    if isinstance(error, SyntaxError | GrowcacheError):
        # The text of a syntax error names file and line. For growcache's own errors, the outer
        # error has the code.
        text = f"{type(error).__name__}: {error}"
    else:
        text = "".join(traceback.format_exception_only(error))
    text = " ".join(text.split())
    most = (
        _MAX_ADVICE_CHARACTERS if isinstance(error, GrowcacheError) else _MAX_ERROR_CHARACTERS
    )
    return text if len(text) <= most else text[: most - 1] + "…"


def _sample_value(value: Any, source: str, name: str, fresh: set[int]) -> Any:
    if isinstance(value, str | bytes):
        return value
    if isinstance(value, bytearray):
        return bytes(value)
    try:
        array = np.asarray(value)
    except _USER_ERRORS as error:
        raise FormatError(
            f"{source}: {name!r} is not an array: {_error_text(error)}", code="GC309"
        ) from None
    # Copied unless read-only, because a function may reuse the array for its next sample.
    array = array.copy() if id(array) not in fresh and _is_writable(array) else array
    return np.asarray(array, array.dtype.newbyteorder("<"), order="C")


def _is_writable(array: Any) -> bool:
    while isinstance(array, np.ndarray):
        if array.flags.writeable:
            return True
        array = array.base
    return False


def child_environment() -> dict[str, str]:
    """Return an environment in which a child can import the same modules as this process."""
    here = str(Path.cwd())
    paths = [path or here for path in [*sys.path, here]]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
