"""Loaders for PyTorch: epochs over a cache as dicts of tensors."""

from typing import TYPE_CHECKING, Any

from growcache.torch.loader import EpochDataLoader, EpochLoader, join_parts, take_rows

if TYPE_CHECKING:
    from growcache.torch.lightning import LightningMetrics as LightningMetrics

# LightningMetrics is not among them, because importing all names must not need Lightning.
__all__ = ["EpochDataLoader", "EpochLoader", "join_parts", "take_rows"]

# The public module, as users see it in pickles, tracebacks and help().
EpochDataLoader.__module__ = EpochLoader.__module__ = __name__


def __getattr__(name: str) -> Any:
    if name != "LightningMetrics":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from growcache.torch.lightning import LightningMetrics

    return LightningMetrics


def __dir__() -> list[str]:
    return sorted([*globals(), "LightningMetrics"])
