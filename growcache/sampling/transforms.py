"""The user's transform: found by name, called by its parameters' names, seeded by place."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import random
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from growcache.errors import ConfigError, FormatError
from growcache.schema import Origin, Sample
from growcache.seeding import derive, generator

PARAMETERS = ("sample", "rng", "origin")


@dataclass(frozen=True, slots=True)
class Transform:
    """A user's function over samples.

    Attributes:
        name: ``package.module:function``.
        digest: of its module's source, a part of the cache's fingerprint.
        function: what is called.
        takes: which of `PARAMETERS` it takes, in its own order.
        seed: of its random generator.
    """

    name: str
    digest: str
    function: Callable[..., Any]
    takes: tuple[str, ...]
    seed: int

    def __call__(self, sample: Sample, origin: Origin, where: tuple[int | str, ...]) -> Sample:
        """Return the transformed sample.

        Args:
            sample: arrays of the object's bytes, read-only; the function gets copies.
            origin: where it came from.
            where: round, key, part and index of the sample; they seed the generator.

        Raises:
            FormatError: the function raised, or returned no sample.
        """
        rng = generator(self.seed, "transform", *where)
        values = {
            "sample": {k: v.copy() for k, v in sample.items()},
            "rng": rng,
            "origin": origin,
        }
        bits = derive(self.seed, "global", *where)
        np.random.seed(bits & 0xFFFFFFFF)  # for code that uses NumPy's and Python's own ones
        random.seed(bits)
        try:
            result = self.function(**{name: values[name] for name in self.takes})
            if isinstance(result, Mapping):
                return {name: np.asarray(value) for name, value in result.items()}
        except Exception as error:  # the user's code may raise anything
            raise FormatError(_explain(self.name, error, origin)) from error
        raise FormatError(
            f"{self.name} must return a dict of arrays, found {type(result).__name__}"
        )


def load_transform(name: str | None, options: Mapping[str, Any], seed: int) -> Transform | None:
    """Return the transform called ``package.module:function``; None for no name.

    A class is made once, with ``options`` as its arguments; a function gets no options.

    Raises:
        ConfigError: it cannot be imported, called or does not take ``sample``.
    """
    if name is None:
        return None
    module_name, colon, attribute = name.partition(":")
    if not colon:
        raise ConfigError(
            f"sampling.transform: expected package.module:function, found {name!r}"
        )
    try:
        module = importlib.import_module(module_name)
        found = getattr(module, attribute)
    except Exception as error:  # the user's module may raise anything
        what = f"{type(error).__name__}: {error}"
        raise ConfigError(f"sampling.transform: cannot load {name}: {what}") from error
    function = _made(found, name, options)
    takes = _takes(function, name)
    return Transform(name, _digest(module.__file__), function, takes, seed)


def _made(found: Any, name: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    if isinstance(found, type):
        try:
            found = found(**options)
        except Exception as error:  # the constructor may raise anything, too
            raise ConfigError(
                f"sampling.transform_options do not fit {name}: {type(error).__name__}: {error}"
            ) from error
    elif options:
        raise ConfigError(
            f"sampling.transform_options: {name} is no class and takes no options"
        )
    if not callable(found):
        raise ConfigError(f"sampling.transform: {name} is not callable")
    return found  # type: ignore[no-any-return]


def _takes(function: Callable[..., Any], name: str) -> tuple[str, ...]:
    parameters = inspect.signature(function).parameters
    takes = tuple(key for key in parameters if key in PARAMETERS)
    others = [
        key
        for key, parameter in parameters.items()
        if key not in PARAMETERS and parameter.default is parameter.empty
    ]
    if others or "sample" not in takes:
        raise ConfigError(
            f"sampling.transform: {name} must take sample, and may take rng and origin, "
            f"found ({', '.join(parameters)})"
        )
    return takes


def _digest(path: str | None) -> str:
    source = Path(path).read_bytes() if path else b""
    return hashlib.blake2b(source, digest_size=16).hexdigest()


def _explain(name: str, error: Exception, origin: Origin) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(frame.filename).name}:{frame.lineno}"
    return f"{name} raised {type(error).__name__}: {error} at {where} on {origin.key}"
