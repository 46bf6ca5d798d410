"""The user's function on its way to other processes."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from growcache.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Shipped:
    """A function as bytes; whoever only passes it on need not be able to import it.

    Attributes:
        code: pickled. What is defined in ``__main__``, a script or a notebook, is in it as
            a value, for nobody can import that without running the script once more.
        takes: which of ``rng`` and ``origin`` it takes.
    """

    code: bytes
    takes: frozenset[str]

    def load(self) -> Callable[..., Any]:
        """Return the function.

        Raises:
            Exception: whatever its module raises when it is imported.
        """
        function: Callable[..., Any] = pickle.loads(self.code)
        return function


# The user's function where it may be on its way: nobody calls it there.
Function: TypeAlias = Callable[..., Any] | Shipped


def ship(function: Function, takes: frozenset[str]) -> Shipped:
    """Return the function as it travels.

    Raises:
        ConfigError: it cannot.
    """
    import cloudpickle  # here, for who has no workers need not wait for it

    if isinstance(function, Shipped):
        return function
    try:
        return Shipped(cloudpickle.dumps(function), takes)
    except Exception as error:  # whatever a part of it does when it is pickled
        raise ConfigError(
            f"transform cannot be sent to the processes of num_workers: {type(error).__name__}: "
            f"{error}; leave out what cannot be pickled, or use num_workers=0"
        ) from error
