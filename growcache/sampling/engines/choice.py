"""Choose the engines that run the samplers of a configuration."""

from __future__ import annotations

from collections.abc import Callable

from growcache.config import Config
from growcache.sampling.engines import Engine
from growcache.sampling.engines.local import LocalEngine
from growcache.sampling.engines.ray_engine import RayEngine
from growcache.sampling.messages import Message


def engines_of(
    config: Config,
    setup: Message,
    on_failure: Callable[[Exception], None],
    on_stderr: Callable[[bytes], None] | None,
) -> list[tuple[Engine, int]]:
    """Return the engines, each with its number of samplers."""
    sampling = config.sampling
    engines: list[tuple[Engine, int]] = [(LocalEngine(on_stderr), sampling.workers)]
    if sampling.engine == "ray":
        engines.append(
            (RayEngine(sampling.ray, setup, on_failure, on_stderr), sampling.ray.workers)
        )
    return engines
