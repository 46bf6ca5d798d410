"""growcache: a bounded local cache of random samples that grows while you train.

Training programs import `growcache.torch`, `growcache.tensorflow` or `growcache.numpy`. This
module imports none of them. Each name is loaded at its first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from growcache import errors

if TYPE_CHECKING:
    from growcache.cli.watch import watch
    from growcache.config import Config
    from growcache.config_text import load_config
    from growcache.errors import GrowcacheError
    from growcache.loading.snapshot import Snapshot
    from growcache.pickles import unpickle_arrays
    from growcache.replays import Replay, replay
    from growcache.sampling.serve import Service, serve, start
    from growcache.schema import Origin

__version__ = "0.2.0"

__all__ = [
    "Config",
    "GrowcacheError",
    "Origin",
    "Replay",
    "Service",
    "Snapshot",
    "load_config",
    "replay",
    "serve",
    "start",
    "unpickle_arrays",
    "watch",
]

_HOMES = {
    "Config": "growcache.config",
    "GrowcacheError": "growcache.errors",
    "Origin": "growcache.schema",
    "Replay": "growcache.replays",
    "Service": "growcache.sampling.serve",
    "Snapshot": "growcache.loading.snapshot",
    "load_config": "growcache.config_text",
    "replay": "growcache.replays",
    "serve": "growcache.sampling.serve",
    "start": "growcache.sampling.serve",
    "unpickle_arrays": "growcache.pickles",
    "watch": "growcache.cli.watch",
}


errors.install_excepthook()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'growcache' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
