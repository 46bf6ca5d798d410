"""A Keras `fit` over a cache: ``python -m … CACHE EPOCHS UNTIL``; prints JSON.

It goes on until the file UNTIL appears, for EPOCHS epochs at least.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import growcache.tensorflow as gtf
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


class Pause(tf.keras.callbacks.Callback):  # type: ignore[misc]
    def __init__(self, epochs: int, until: Path) -> None:
        super().__init__()
        self.least = epochs
        self.until = until
        self.epochs = 0

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        time.sleep(0.2)
        self.epochs = epoch + 1
        self.model.stop_training = self.epochs >= self.least and self.until.exists()


def main(cache: str, epochs: int, until: Path) -> None:
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
    pause = Pause(epochs, until)
    model.fit(dataset, steps_per_epoch=STEPS, epochs=10_000, verbose=0, callbacks=[pause])
    print(json.dumps({**tally, "seen": len(seen), "epochs": pause.epochs}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
