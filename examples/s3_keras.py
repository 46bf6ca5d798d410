"""Train a small Keras model on a cache that grows from a bucket.

    python examples/s3_keras.py --url 's3://bucket/train/*.npy'

Each object is one .npy array and one sample. TensorFlow reads the cache with its own code.
The task, to predict a sample's mean, needs no labels.
"""

from __future__ import annotations

import argparse
from typing import Any

import keras
import tensorflow as tf

import growcache
import growcache.tensorflow as gtf


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on a growing cache with Keras.")
    parser.add_argument("--url", required=True, help="objects, with globs")
    parser.add_argument("--cache", default="cache", help="a folder on a local disk")
    parser.add_argument("--max-bytes", default="1GB", help="the upper bound of its size")
    parser.add_argument("--min-samples", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--steps-per-epoch", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=10)
    arguments = parser.parse_args()

    config = {
        "source": {"url": arguments.url, "format": "npy"},
        "cache": {"path": arguments.cache, "max_bytes": arguments.max_bytes},
    }

    with growcache.serve(config):  # draws samples in the background until this block ends
        # One endless pipeline runs through all epochs, so there is no gap between them. It
        # includes newly cached samples.
        endless = gtf.dataset(
            arguments.cache,
            batch_size=arguments.batch_size,
            min_samples=arguments.min_samples,
            endless=True,
        )
        model = keras.Sequential(
            [
                keras.layers.Flatten(),
                keras.layers.Dense(32, activation="relu"),
                keras.layers.Dense(1),
            ]
        )
        model.compile(optimizer="adam", loss="mse")
        model.fit(
            endless.map(with_mean),
            steps_per_epoch=arguments.steps_per_epoch,
            epochs=arguments.epochs,
            shuffle=False,  # the dataset is already shuffled
            verbose=2,
        )


def with_mean(batch: dict[str, Any]) -> tuple[Any, Any]:
    x = tf.cast(batch["x"], tf.float32)
    return x, tf.reduce_mean(tf.reshape(x, [tf.shape(x)[0], -1]), axis=1)


if __name__ == "__main__":
    main()
