"""PyTorch's front door: epochs over a cache as dicts of tensors."""

from growcache.torch.copies import join_parts, take_rows
from growcache.torch.epochs import EpochLoader

__all__ = ["EpochLoader", "join_parts", "take_rows"]

# Where users know it to be: in pickles, in tracebacks, in help().
EpochLoader.__module__ = __name__
