"""TensorFlow input from a cache: epochs as a `tf.data.Dataset`."""

from growcache.tensorflow.datasets import EpochDataset, Files, dataset, files
from growcache.tensorflow.native import CYCLE_SHARDS, SHUFFLE_BYTES, SHUFFLE_SAMPLES

__all__ = [
    "CYCLE_SHARDS",
    "SHUFFLE_BYTES",
    "SHUFFLE_SAMPLES",
    "EpochDataset",
    "Files",
    "dataset",
    "files",
]

# The public module, as users see it in tracebacks and help().
EpochDataset.__module__ = dataset.__module__ = __name__
Files.__module__ = files.__module__ = __name__
