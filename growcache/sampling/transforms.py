"""The user's transform of cached samples: called by its parameters' names, seeded by place."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from growcache.errors import ConfigError
from growcache.schema import Array, Origin, Sample
from growcache.seeding import derive, generator
from growcache.usercode import UserCode, load_code

PARAMETERS = ("sample", "rng", "origin")


@dataclass(frozen=True, slots=True)
class Transform:
    """A user's function over samples.

    Attributes:
        code: the function, its options bound.
        seed: of its random generator.
    """

    code: UserCode
    seed: int

    @property
    def digest(self) -> str:
        """Of its module's source, a part of the cache's fingerprint."""
        return self.code.digest

    def __call__(
        self, sample: Sample, origin: Origin, where: tuple[int | str, ...]
    ) -> Sample | None:
        """Return the transformed sample; None where the function returned None: skip it.

        Args:
            sample: arrays of the object's bytes, read-only; the function gets copies.
            origin: where it came from.
            where: round, key, part and index of the sample; they seed the generator.

        Raises:
            FormatError: the function raised, or returned no sample.
        """
        copies = {name: _copy(value) for name, value in sample.items()}
        rng = generator(self.seed, "transform", *where)
        bits = derive(self.seed, "global", *where)
        np.random.seed(bits & 0xFFFFFFFF)  # for code that uses NumPy's and Python's own ones
        random.seed(bits)
        values = {"sample": copies, "rng": rng, "origin": origin}
        given = list(copies.values())
        result = self.code(origin.key, values)
        return None if result is None else self.code.sample(origin.key, result, given)


def load_transform(name: str | None, options: Mapping[str, Any], seed: int) -> Transform | None:
    """Return the transform called ``package.module:function``; None for no name.

    A class is made once, with ``options`` as its arguments; a function gets them as keyword
    arguments beside ``sample``, ``rng`` and ``origin``, of which it takes what it names.

    Raises:
        ConfigError: it cannot be imported, called or does not take ``sample``.
    """
    if name is None:
        return None
    where = ("sampling.transform", "sampling.transform_options")
    code = load_code(name, options, PARAMETERS, where)
    if "sample" not in code.parameters:
        raise ConfigError(
            f"sampling.transform: {name} must take sample, and may take rng and origin, "
            f"found ({', '.join(code.parameters)})"
        )
    return Transform(code, seed)


def _copy(value: Any) -> Array | Any:
    return value.copy() if isinstance(value, np.ndarray) else value
