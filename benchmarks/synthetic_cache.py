"""Caches of random samples, written by the cache's own writer: what the loaders are measured on."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.noise import random_samples
from growcache.cache.formats.encoding import EncodedFile
from growcache.cache.incoming import (
    PackedShard,
    bytes_to_reserve,
    encode_shard,
    write_incoming,
)
from growcache.cache.sidecar import Origins, Sidecar
from growcache.schema import Array, Field, Schema
from tests.filled import FINGERPRINT, PERMIT, Filled

CONTENTS = 16  # of the shards that are added by the thousand
TOGETHER = 256  # of them in one commit
WRITERS = 8  # threads, because each file is waited for until it is on the disk

__all__ = ["SyntheticCache", "random_samples"]


class SyntheticCache(Filled):
    """A cache in the hands of its only writer; a context manager.

    Args:
        root: of the cache.
        dtype: of the one field, ``x``.
        shape: of it; None for ragged dimensions.
        config: bound and eviction; roomy by default.
    """

    def __init__(
        self, root: Path, dtype: str, shape: tuple[int | None, ...], **config: Any
    ) -> None:
        schema = Schema((Field("x", dtype, shape),))
        super().__init__(root, schema=schema, **{"max_bytes": 10_000_000_000, **config})

    def add_arrays(self, number: int, arrays: Array | list[Array]) -> None:
        """Commit a shard of one sample per array."""
        self.add_samples(number, [{"x": array} for array in arrays])

    def add_thousands(self, numbers: Sequence[int], samples: int) -> None:
        """Commit many small shards of random samples in little time.

        Their contents repeat, so that only a few have to be encoded.

        Args:
            numbers: of the shards, ascending.
            samples: in each.
        """
        rng = np.random.default_rng(0)
        field = self.schema.fields[0]
        contents = [
            self._encoded(random_samples(rng, field.dtype, (samples, *field.fixed_shape)))
            for _ in range(CONTENTS)
        ]
        with ThreadPoolExecutor(WRITERS) as writers:
            for start in range(0, len(numbers), TOGETHER):
                together = numbers[start : start + TOGETHER]
                self.cache.meta.issue(together[-1])
                made = [(self._sidecar(n, contents[n % CONTENTS]), n) for n in together]
                assert self.cache.reserve(PERMIT, sum(bytes_to_reserve(s) for s, _ in made))
                futures = [
                    writers.submit(
                        write_incoming, self.layout, PERMIT, s, contents[n % CONTENTS].files
                    )
                    for s, n in made
                ]
                self.cache.commit(PERMIT, [future.result() for future in futures])

    def _encoded(self, arrays: Array) -> PackedShard:
        packed = encode_shard(self.format, self.schema, [{"x": array} for array in arrays])
        return replace(packed, files=[_at_hand(file) for file in packed.files])

    def _sidecar(self, number: int, packed: PackedShard) -> Sidecar:
        samples = packed.facts["samples"]
        origins = Origins(
            keys=(f"object-{number}",),
            etags=(None,),
            sizes=(1,),
            mtimes=(None,),
            object=(0,) * samples,
            part=(0,) * samples,
            parts=(1,) * samples,
            start=tuple(range(samples)),
            stop=tuple(range(1, samples + 1)),
        )
        return Sidecar(
            fingerprint=FINGERPRINT,
            edition=0,
            round=0,
            number=number,
            group=number,
            parts=samples,
            origins=origins,
            **packed.facts,
        )


def _at_hand(file: EncodedFile) -> EncodedFile:
    """Return the file with its bytes made once for all."""
    return file._replace(pieces=[b"".join(bytes(piece) for piece in file.pieces)])
