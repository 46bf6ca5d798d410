"""A training loop that evaluates on held-out samples at regular steps, the same for every arm."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

LEARNING_RATE = 1e-3
SHIFT = 2  # pixels, at most, that an augmented image is moved by
EVALUATED_AT_ONCE = 64  # windows of text, of which every byte has 256 logits


class Batch(NamedTuple):
    """Inputs and classes of some samples."""

    inputs: Tensor
    labels: Tensor


class Point(NamedTuple):
    """A place on the curve of a run; `value` is the metric of its recipe."""

    step: int
    seconds: float
    value: float


def class_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the cross-entropy of the classes."""
    return nn.functional.cross_entropy(model(batch.inputs), batch.labels)


@torch.no_grad()
def accuracy(model: nn.Module, test: Batch) -> float:
    """Return the share of test samples that the model classifies rightly, in percent."""
    right = model(test.inputs).argmax(1) == test.labels
    return 100 * float(right.double().mean())


def next_byte_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the cross-entropy of each byte but the first, given those before it."""
    logits = model(batch.inputs[:, :-1])
    return nn.functional.cross_entropy(logits, batch.inputs[:, 1:].long())


@torch.no_grad()
def bits_per_byte(model: nn.Module, test: Batch) -> float:
    """Return the mean bits that the model needs for a byte of the test windows."""
    windows = torch.split(test.inputs, EVALUATED_AT_ONCE)
    nats = [float(next_byte_loss(model, Batch(some, some))) * len(some) for some in windows]
    return sum(nats) / len(test.inputs) / math.log(2)


@dataclass(frozen=True, slots=True)
class Recipe:
    """The settings that all arms of an experiment share; only their data differ."""

    steps: int
    evaluate_every: int
    batch_size: int
    model: Callable[[int], nn.Module]
    augment: bool = False
    learning_rate: float = LEARNING_RATE
    decays: bool = False  # the learning rate, to zero at the last step
    loss: Callable[[nn.Module, Batch], Tensor] = class_loss
    evaluate: Callable[[nn.Module, Batch], float] = accuracy


def train(recipe: Recipe, batches: Iterator[Batch], test: Batch, seed: int) -> Iterator[Point]:
    """Train for the recipe's steps; yields a point after every evaluation."""
    torch.set_num_threads(1)
    model = recipe.model(seed)
    optimizer = torch.optim.Adam(model.parameters(), recipe.learning_rate, fused=True)
    last_factor = 0.0 if recipe.decays else 1.0
    rate = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, last_factor, recipe.steps)
    random = torch.Generator().manual_seed(seed)
    spent, began = 0.0, time.monotonic()
    for step in range(1, recipe.steps + 1):
        batch = next(batches)
        inputs = shifted(batch.inputs, random) if recipe.augment else batch.inputs
        optimizer.zero_grad()
        loss = recipe.loss(model, batch._replace(inputs=inputs))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        rate.step()
        if step % recipe.evaluate_every == 0:
            spent += time.monotonic() - began
            yield Point(step, spent, recipe.evaluate(model, test))
            began = time.monotonic()


def shifted(images: Tensor, random: torch.Generator) -> Tensor:
    """Move each image by up to `SHIFT` pixels in both directions; what comes in is zero."""
    count, height, width = images.shape
    padded = nn.functional.pad(images, (SHIFT,) * 4)
    down, right = torch.randint(0, 2 * SHIFT + 1, (2, count, 1), generator=random)
    rows = (down + torch.arange(height))[:, :, None]
    columns = (right + torch.arange(width))[:, None, :]
    return padded[torch.arange(count)[:, None, None], rows, columns]
