"""How much the native pipeline holds, and hands on at once; functions of what is cached."""

from __future__ import annotations

from dataclasses import dataclass

SHUFFLE_BYTES = 64_000_000  # shards are mixtures already, so a small buffer mixes enough
SHUFFLE_SAMPLES = 16_384
BUFFERS_PER_PASS = 4

# To hand a record from thread to thread takes TensorFlow 15 us, and a core that has to wake up.
CHUNK_BYTES = 2_000_000
CHUNK_SAMPLES = 64
CHUNKS_PER_SHARD = 8  # at least, so that those that are read at a time are mixed

# To have Python count where a batch came from takes 0.14 ms of CPU time.
BLOCK_BYTES = 2_000_000
BLOCK_BATCHES = 8
BLOCKS_PER_PASS = 4


@dataclass(frozen=True)
class Cached:
    """What there is when an iteration begins.

    Attributes:
        samples: their number.
        sample_bytes: of one, on average.
        runs_on: whether a pass follows the other, with no end to it.
    """

    samples: int
    sample_bytes: int
    runs_on: bool

    def buffer_samples(self) -> int:
        """Return the size of the shuffle buffer.

        Where passes run on, it stays well below one: a sample may be left in the buffer for
        several times its size, and nothing but chance ends that.
        """
        wanted = min(SHUFFLE_SAMPLES, self._fit(SHUFFLE_BYTES))
        most = self.samples // BUFFERS_PER_PASS if self.runs_on else self.samples
        return max(1, min(wanted, most))

    def chunk_samples(self, shard_samples: int) -> int:
        """Return how many records of a shard are handed from thread to thread at once."""
        most = min(CHUNK_SAMPLES, self._fit(CHUNK_BYTES))
        return max(1, min(most, shard_samples // CHUNKS_PER_SHARD))

    def block_samples(self, batch_size: int) -> int:
        """Return how many samples are decoded at once, which are whole batches.

        Where passes run on, they are few of one: batches wait for all of a block, which
        waits for what is not cached yet.
        """
        batches = min(BLOCK_BATCHES, self._fit(BLOCK_BYTES) // batch_size)
        if self.runs_on:
            batches = min(batches, self.samples // (BLOCKS_PER_PASS * batch_size))
        return batch_size * max(1, batches)

    def _fit(self, nbytes: int) -> int:
        return nbytes // max(1, self.sample_bytes)
