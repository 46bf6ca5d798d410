"""The service of a program's Dataset, as a child of the program; see `from_dataset`.

Importable code is passed by name, and the samplers import it themselves. An instance, or a
function of a script or notebook, is passed as a pickle, in a file that only this user can read.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import io
import os
import pickle
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import orjson

from growcache.config_text import load_config
from growcache.errors import CacheBusyError, ConfigError
from growcache.formats.dataset import require_length
from growcache.launcher import with_launched_node
from growcache.sampling.serve import served
from growcache.usercode import (
    PICKLED,
    PICKLED_PATH,
    CodeDigest,
    is_dataset,
    source_digest,
)

JOIN_SECONDS = 30.0  # for the service that another rank starts


@dataclass(frozen=True, slots=True)
class GivenDataset:
    """A program's Dataset in the form that samplers need."""

    name: str  # source.dataset
    options: dict[str, Any]  # source.options, which are part of the fingerprint
    pickled: bytes | None = None


def given_dataset(dataset: Any, name: str | None = None) -> GivenDataset:
    """Return the form in which samplers get a Dataset, or a function that makes one.

    In the fingerprint, ``name`` represents a Dataset without source code: an instance or a
    closure.
    """
    if isinstance(dataset, str):
        return GivenDataset(dataset, {})
    if is_dataset(dataset):
        length = require_length(dataset, type(dataset).__qualname__)
        derived = f"{_kind_name(type(dataset))}[{length}]"
        held = {"found": dataset, "makes": False, "digest": None, "root": _root(type(dataset))}
        return GivenDataset(f"{PICKLED}:{name or derived}", {}, _pickled(held))
    if not callable(dataset):
        raise ConfigError(
            "from_dataset: expected a map-style Dataset, a function that makes one, or "
            f"'package.module:function', found {type(dataset).__qualname__}",
            code="GC114",
        )
    return _given_maker(dataset, name)


def _given_maker(maker: Callable[..., Any], name: str | None) -> GivenDataset:
    function, options = _unbound(maker)
    plain = _is_plain(options)
    if name is None and plain and (imported := _importable_name(function)) is not None:
        return GivenDataset(imported, options)
    if name is None and not (plain and _says_all(function)):
        raise ConfigError(
            "from_dataset: give name=, which stands for the dataset in the cache's fingerprint: "
            f"{_kind_name(function)} has variables or arguments of which no fingerprint can be "
            "made (a function of a module, or functools.partial of one, needs none)",
            code="GC114",
        )
    digest = None if name is not None else _function_digest(function)
    held = {"found": maker, "makes": True, "digest": digest, "root": _root(function)}
    shown = name or _kind_name(function)
    return GivenDataset(f"{PICKLED}:{shown}", options if plain else {}, _pickled(held))


def _unbound(maker: Callable[..., Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return the function of a partial, and its arguments by name."""
    if not isinstance(maker, functools.partial):
        return maker, {}
    try:
        bound = inspect.signature(maker.func).bind(*maker.args, **maker.keywords).arguments
    except (TypeError, ValueError) as error:
        raise ConfigError(f"from_dataset: {error}", code="GC114") from None
    return maker.func, {**bound.pop("kwargs", {}), **bound}


def _is_plain(options: Mapping[str, Any]) -> bool:
    """Whether a configuration can contain these values."""
    try:
        return bool(orjson.loads(orjson.dumps(options)) == options)
    except TypeError:
        return False


def _importable_name(function: Callable[..., Any]) -> str | None:
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "<")
    if module in (None, "__main__") or "<" in name:
        return None
    try:
        found: Any = importlib.import_module(str(module))
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return None
    return f"{module}:{name}" if found is function else None


def _says_all(function: Callable[..., Any]) -> bool:
    """Whether a function or class depends only on its source and globals."""
    return not getattr(function, "__closure__", None) and bool(_source(function))


def _source(function: Callable[..., Any]) -> str:
    try:
        return textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):  # typed at a prompt, or not a Python function
        return ""


def _function_digest(function: Callable[..., Any]) -> CodeDigest:
    return source_digest(_source(function).encode())


def _kind_name(kind: Any) -> str:
    module = getattr(kind, "__module__", "")
    name = getattr(kind, "__qualname__", type(kind).__qualname__)
    plain = name.replace("<locals>.", "").replace("<lambda>", "lambda")
    return plain if module in ("builtins", "__main__") else f"{module}.{plain}"


def _root(kind: Any) -> str:
    """Return the file of the user's code, whose lines errors show."""
    try:
        return inspect.getfile(kind)
    except (OSError, TypeError):
        return ""


def _dumped(held: Mapping[str, Any]) -> bytes:
    import cloudpickle  # here, because most programs do not need it

    class Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            # cloudpickle takes `self.classes` for a use of torch.classes, which it cannot
            # pickle.
            if isinstance(obj, ModuleType) and type(obj) is not ModuleType:
                return importlib.import_module, (obj.__name__,)
            return super().reducer_override(obj)

    with io.BytesIO() as file:
        Pickler(file, pickle.HIGHEST_PROTOCOL).dump(dict(held))
        return file.getvalue()


def _pickled(held: Mapping[str, Any]) -> bytes:
    try:
        return _dumped(held)
    except Exception as error:  # pickling a part of it may raise anything
        raise ConfigError(
            f"from_dataset: the dataset cannot be sent to sampler processes: {type(error).__name__}: "
            f"{error}; give a function that makes it there, such as "
            "functools.partial(make, folder='data')",
            code="GC109",
        ) from error


# ----------------------------------------------------------------------------- the service


def settings_of(
    given: GivenDataset,
    path: str | os.PathLike[str],
    max_bytes: str | int | None,
    workers: int | None,
    names: Sequence[str] | None,
    more: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the configuration.

    ``more`` has settings by section, as in a configuration file.
    """
    values: dict[str, Any] = {**more}
    source = {"dataset": given.name, "names": None if names is None else list(names)}
    sampling = {} if workers is None else {"workers": workers}
    cache = {"path": str(path)} | ({} if max_bytes is None else {"max_bytes": max_bytes})
    own: dict[str, dict[str, Any]] = {"source": source, "sampling": sampling, "cache": cache}
    for section, settings in own.items():
        values[section] = {**values.get(section, {}), **settings}
    if given.options:
        values["source"]["options"] = given.options
    return values


@contextlib.contextmanager
def _pickle_file(given: GivenDataset) -> Iterator[dict[str, str]]:
    """Yield the variables from which samplers find the pickle."""
    if given.pickled is None:
        yield {}
        return
    with tempfile.NamedTemporaryFile(prefix="growcache-dataset-") as file:
        file.write(given.pickled)
        file.flush()
        yield {PICKLED_PATH: file.name}


def start_service(given: GivenDataset, values: Mapping[str, Any]) -> ExitStack:
    """Start the service, or join that of another rank. Closing the result ends the service."""
    config = with_launched_node(load_config(values, environment=os.environ))
    deadline = time.monotonic() + JOIN_SECONDS
    with ExitStack() as opened:
        variables = opened.enter_context(_pickle_file(given))
        while True:
            try:
                opened.enter_context(served(config, variables=variables))
            except CacheBusyError:  # another rank is starting one
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
            else:
                return opened.pop_all()
