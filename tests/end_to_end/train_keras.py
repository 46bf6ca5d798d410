"""A Keras `fit` over a cache: ``python -m … CACHE EPOCHS``; prints JSON."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import growcache.tensorflow as gtf
import numpy as np
import tensorflow as tf

from tests.end_to_end.recordings import SHAPE, wrong

STEPS = 20
tally = {"wrong": 0, "samples": 0}
seen: set[int] = set()


def compare(numbers: Any, samples: Any) -> Any:
    tally["wrong"] += wrong(numbers, samples)
    tally["samples"] += len(numbers)
    seen.update(numbers.tolist())
    return np.int64(0)


def checked(numbers: Any, x: Any, y: Any) -> Any:
    """Pass a batch on, once every sample of it was compared to its object."""
    with tf.control_dependencies([tf.numpy_function(compare, [numbers, x], tf.int64)]):
        return tf.identity(x), y


def main(cache: str, epochs: int) -> None:
    dataset = gtf.dataset(
        cache,
        batch_size=16,
        min_samples=32,
        seed=2,
        job="keras",
        as_tuple=("number", "x", "y"),
        endless=True,
    ).map(checked)
    model = tf.keras.Sequential(
        [tf.keras.layers.Input(SHAPE), tf.keras.layers.Flatten(), tf.keras.layers.Dense(1)]
    )
    model.compile(optimizer="sgd", loss="mse")
    pause = tf.keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: time.sleep(0.2))
    model.fit(dataset, steps_per_epoch=STEPS, epochs=epochs, verbose=0, callbacks=[pause])
    print(json.dumps({**tally, "seen": len(seen)}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
