"""Train a small JAX model on a cache that grows from a bucket.

    python examples/jax_numpy.py --url 's3://bucket/train/*.npy'

Each object is one .npy array and one sample. `growcache.numpy.EpochLoader` delivers NumPy
arrays, which JAX accepts unchanged. The task, to predict a sample's mean, needs no labels.
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp

import growcache
from growcache.numpy import EpochLoader

LEARNING_RATE = 0.01


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on a growing cache with JAX.")
    parser.add_argument("--url", required=True, help="objects, with globs")
    parser.add_argument("--cache", default="cache", help="a folder on a local disk")
    parser.add_argument("--max-bytes", default="1GB", help="the upper bound of its size")
    parser.add_argument("--min-samples", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=10)
    arguments = parser.parse_args()

    config = {
        "source": {"url": arguments.url, "format": "npy"},
        "cache": {"path": arguments.cache, "max_bytes": arguments.max_bytes},
    }

    with (
        growcache.serve(config),  # draws samples in the background until this block ends
        # All batches have the same size (drop_last), so JAX compiles the step once.
        EpochLoader(
            arguments.cache,
            batch_size=arguments.batch_size,
            min_samples=arguments.min_samples,
        ) as loader,
    ):
        parameters = None
        for epoch in range(arguments.epochs):
            total = jnp.zeros(())
            for batch in loader:  # a new epoch over all samples cached by now
                x = jnp.asarray(batch["x"])
                parameters = parameters or first_parameters(x)
                parameters, loss = step(parameters, x)
                total += loss * len(x)  # no float(), because that would wait for the step
            mean = float(total) / max(1, loader.report.samples)
            print(f"epoch {epoch}: loss {mean:.4f}; {loader.report}")


def first_parameters(x: jax.Array, width: int = 32) -> dict[str, jax.Array]:
    first, last = jax.random.split(jax.random.key(0))
    inputs = x[0].size
    return {
        "first": jax.random.normal(first, (inputs, width)) / jnp.sqrt(inputs),
        "last": jax.random.normal(last, (width,)) / jnp.sqrt(width),
    }


def loss_of(parameters: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    flat = x.reshape(len(x), -1).astype(jnp.float32)
    predicted = jax.nn.relu(flat @ parameters["first"]) @ parameters["last"]
    return jnp.mean((predicted - flat.mean(1)) ** 2)


@jax.jit
def step(
    parameters: dict[str, jax.Array], x: jax.Array
) -> tuple[dict[str, jax.Array], jax.Array]:
    loss, slopes = jax.value_and_grad(loss_of)(parameters, x)
    return jax.tree.map(lambda p, g: p - LEARNING_RATE * g, parameters, slopes), loss


if __name__ == "__main__":
    main()
