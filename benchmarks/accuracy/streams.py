"""Streams over class-sorted objects that keep no cache: a shuffle buffer, and CorgiPile's block shuffle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.accuracy.in_memory import sample_bytes
from benchmarks.accuracy.training import Batch

Places = npt.NDArray[np.int64]
Order = Callable[[list[Places], int, np.random.Generator], Iterator[int]]


def buffered(
    objects: list[Places], capacity: int, random: np.random.Generator
) -> Iterator[int]:
    """Read the objects in random order into a buffer, and yield samples of it at random."""
    buffer: list[int] = []
    for number in random.permutation(len(objects)):
        for place in objects[number]:
            buffer.append(int(place))
            if len(buffer) > capacity:
                yield buffer.pop(random.integers(len(buffer)))
    random.shuffle(buffer)
    yield from buffer


def block_shuffled(
    objects: list[Places], capacity: int, random: np.random.Generator
) -> Iterator[int]:
    """Fill the buffer with objects at random, yield all of it shuffled, and fill it again."""
    order = random.permutation(len(objects))
    each = max(1, capacity // len(objects[0]))
    for start in range(0, len(order), each):
        block = np.concatenate([objects[number] for number in order[start : start + each]])
        yield from random.permutation(block)


@dataclass
class StreamFeed:
    """Batches of a stream that begins anew, in another order, at every epoch."""

    samples: Batch
    per_object: int
    capacity: int
    batch_size: int
    seed: int
    order: Order
    read: int = field(default=0, init=False)

    def batches(self) -> Iterator[Batch]:
        """Yield batches without end; those of an epoch's end may hold samples of the next."""
        random, taken = np.random.default_rng(self.seed), list[int]()
        places = np.arange(len(self.samples.labels))
        objects = np.split(places, range(self.per_object, len(places), self.per_object))
        while True:
            for place in self.order(objects, self.capacity, random):
                taken.append(place)
                if len(taken) == self.batch_size:
                    self.read += len(taken)
                    rows = torch.tensor(taken)
                    yield Batch(self.samples.inputs[rows], self.samples.labels[rows])
                    taken.clear()

    def egress_bytes(self) -> int:
        """Return the bytes of the samples that were delivered."""
        return self.read * sample_bytes(self.samples)

    def figures(self) -> dict[str, float]:
        """Return the reuse, which is 1: every delivery was read for it."""
        return {"reuse": 1.0}
