"""PyTorch's front door: epochs over a cache as dicts of tensors."""

from growcache.torch.loader import EpochDataLoader, EpochLoader, join_parts, take_rows

__all__ = ["EpochDataLoader", "EpochLoader", "join_parts", "take_rows"]

# Where users know them to be: in pickles, in tracebacks, in help().
EpochDataLoader.__module__ = EpochLoader.__module__ = __name__
