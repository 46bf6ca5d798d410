"""A training loop that evaluates on held-out samples every so many steps, the same for every arm."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

LEARNING_RATE = 1e-3
SHIFT = 2  # pixels, at most, that an augmented image is moved by


class Batch(NamedTuple):
    """Inputs and classes of some samples."""

    inputs: Tensor
    labels: Tensor


class Point(NamedTuple):
    """A place on the curve of a run; `value` is the accuracy in percent."""

    step: int
    seconds: float
    value: float


@dataclass(frozen=True, slots=True)
class Recipe:
    """What all arms of an experiment share but for their data."""

    steps: int
    evaluate_every: int
    batch_size: int
    model: Callable[[int], nn.Module]
    augment: bool = False


def train(recipe: Recipe, batches: Iterator[Batch], test: Batch, seed: int) -> Iterator[Point]:
    """Train for the recipe's steps; yields a point after every evaluation."""
    torch.set_num_threads(1)
    model = recipe.model(seed)
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE)
    random = torch.Generator().manual_seed(seed)
    spent, began = 0.0, time.monotonic()
    for step in range(1, recipe.steps + 1):
        batch = next(batches)
        inputs = shifted(batch.inputs, random) if recipe.augment else batch.inputs
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), batch.labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % recipe.evaluate_every == 0:
            spent += time.monotonic() - began
            yield Point(step, spent, accuracy(model, test))
            began = time.monotonic()


@torch.no_grad()
def accuracy(model: nn.Module, test: Batch) -> float:
    """Return the share of test samples that the model classifies rightly, in percent."""
    right = model(test.inputs).argmax(1) == test.labels
    return 100 * float(right.double().mean())


def shifted(images: Tensor, random: torch.Generator) -> Tensor:
    """Move each image by up to `SHIFT` pixels in both directions; what comes in is zero."""
    count, height, width = images.shape
    padded = nn.functional.pad(images, (SHIFT,) * 4)
    down, right = torch.randint(0, 2 * SHIFT + 1, (2, count, 1), generator=random)
    rows = (down + torch.arange(height))[:, :, None]
    columns = (right + torch.arange(width))[:, None, :]
    return padded[torch.arange(count)[:, None, None], rows, columns]
