"""PyTorch's front door: epochs over a cache as dicts of tensors."""

from __future__ import annotations

import ctypes
import functools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

import torch

from growcache.errors import ConfigError, FormatError
from growcache.loading.epochs import Engine
from growcache.loading.gather import Bytes, Integers
from growcache.loading.maps import Verify
from growcache.loading.options import LoaderOptions
from growcache.loading.report import Report
from growcache.loading.waiting import wait_for_samples

__all__ = ["EpochLoader", "take_rows"]

Tensors: TypeAlias = dict[str, torch.Tensor] | tuple[torch.Tensor, ...]

# Rows with fewer elements are copied by memcpy, those with more through a tensor iterator
# that is a third slower and starts a parallel region per row (at::internal::GRAIN_SIZE).
GRAIN_ELEMENTS = 32_768
SMALLEST_CHUNK = 2048


def take_rows(source: Bytes, rows: Integers, out: Bytes) -> None:
    """Copy ``source[rows]`` into ``out`` in one operation that releases the GIL once.

    Args:
        source: uint8 [samples, nbytes], with any distance between rows.
        rows: int64 [n].
        out: uint8 [n, nbytes], contiguous.

    Raises:
        IndexError: a row that is not there.
    """
    samples, nbytes = source.shape
    table, index, target = map(torch.from_numpy, (source, rows, out))
    chunk = _chunk_bytes(nbytes)
    if chunk != nbytes:
        # Long rows as many short ones: over a view whose rows start at every single byte.
        stride = source.strides[0] if samples > 1 else nbytes
        starts = (samples - 1) * stride + nbytes - chunk + 1
        table = torch.as_strided(table, (starts, chunk), (1, 1))
        index = (index[:, None] * stride + torch.arange(0, nbytes, chunk)).reshape(-1)
        target = target.view(-1, chunk)
    torch.index_select(table, 0, index, out=target)


@functools.lru_cache(maxsize=256)
def _chunk_bytes(nbytes: int) -> int:
    """Return the largest divisor of a row below the grain, or the row where it has none."""
    if nbytes < GRAIN_ELEMENTS:
        return nbytes
    pieces = range(-(-nbytes // (GRAIN_ELEMENTS - 1)), nbytes // SMALLEST_CHUNK + 1)
    return next((nbytes // n for n in pieces if nbytes % n == 0), nbytes)


def _copy_in_this_thread_alone() -> None:
    """Keep torch's operations of the calling thread out of its pool of threads.

    Copying is bound by memory, and waiting for a second thread that is preempted, or busy
    with the user's step, costs a factor of ten. OpenMP keeps the number per thread, so
    this changes nothing for others; `torch.set_num_threads` would.
    """
    torch.get_num_threads()  # torch sets the number when a thread first asks for it
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for path in sorted(set(re.findall(r"(/\S*/lib(?:gomp|iomp5|omp)\b\S*)", maps))):
        try:
            ctypes.CDLL(path).omp_set_num_threads(1)
        except (OSError, AttributeError):
            continue


def _tensor(name: str, array: Any) -> torch.Tensor:
    try:
        return torch.from_numpy(array)
    except TypeError:
        raise FormatError(
            f"field {name!r} has dtype {array.dtype}, which torch does not have; cast it in "
            "sampling.transform or in the loader's transform"
        ) from None


class EpochLoader:
    """Batches from a growing cache; every iteration is a new epoch over what is there by now.

    The next epoch's snapshot, plan and first batches are made before the current epoch ends.
    Tensors may be kept: their memory is reused only once nobody refers to it. A loader
    pickles as its arguments. Iterating anew ends the iteration before it.

    Args:
        path: of the cache directory; it need not exist yet.
        batch_size: samples per batch.
        min_samples: wait until so many are cached, or the whole population is.
        samples_per_epoch: None makes an epoch of everything that is cached, so it grows;
            a number makes every epoch of exactly so many samples, part of a pass over the
            cache or several, with the cursor carried over.
        seed: of the order, and of the transform's generators.
        shuffle: False gives shards by number and samples as they were drawn.
        drop_last: leave a last, smaller batch out.
        fixed: wait until the cache is complete; then every epoch is one pass in order, and
            its last batch is kept. For validation.
        transform: ``function(sample, rng, origin)``, called at every delivery, in threads;
            arguments but the first go by name and may be left out. ``sample`` is a dict of
            arrays of its own, ``rng`` a generator from (seed, pass, position), ``origin``
            the sample's `growcache.Origin`. It returns a dict of arrays of equal shapes.
        as_tuple: names of fields; batches are tuples of these instead of dicts.
        job: in whose name uses are counted.
        verify: check a shard when this process first maps it, or in every pass.

    Yields dicts of field name to tensor [batch, *shape] in the dtype of the schema.

    Raises:
        ConfigError: arguments that cannot be meant.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        batch_size: int,
        min_samples: int = 1000,
        samples_per_epoch: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = True,
        fixed: bool = False,
        transform: Callable[..., Any] | None = None,
        as_tuple: Sequence[str] | None = None,
        job: str = "default",
        verify: Verify = "first",
    ) -> None:
        self._options = LoaderOptions(
            path=path,
            batch_size=batch_size,
            min_samples=min_samples,
            samples_per_epoch=samples_per_epoch,
            seed=seed,
            shuffle=shuffle,
            drop_last=drop_last,
            fixed=fixed,
            transform=transform,
            job=job,
            verify=verify,
        )
        if isinstance(as_tuple, str):
            raise ConfigError(f"as_tuple must be a sequence of names, found {as_tuple!r}")
        self._as_tuple = None if as_tuple is None else tuple(as_tuple)
        self._open()

    def _open(self) -> None:
        self._engine = Engine(self._options, take_rows, _copy_in_this_thread_alone)

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over the next epoch (of `Tensors`, left untyped for user code)."""
        return self._epoch()

    def _epoch(self) -> Iterator[Tensors]:
        for batch in self._engine.epoch():
            tensors = {name: _tensor(name, array) for name, array in batch.items()}
            del batch  # or its arrays would outlive the tensors by one step
            yield tensors if self._as_tuple is None else self._tuple(tensors)

    def _tuple(self, tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        assert self._as_tuple is not None
        try:
            return tuple(tensors[name] for name in self._as_tuple)
        except KeyError as error:
            raise ConfigError(
                f"as_tuple: no field {error.args[0]!r}; there are {', '.join(tensors)}"
            ) from None

    def __len__(self) -> int:
        """Return the batches of an epoch; for ``fixed`` this waits for the whole cache.

        Raises:
            TypeError: epochs grow, so there is no such number.
        """
        if self._options.fixed:
            view = wait_for_samples(
                self._options.root, self._options.min_samples, complete=True
            )
            return self._options.steps(view.totals.samples)
        steps = self._options.steps_per_epoch
        if steps is None:
            raise TypeError(
                "an epoch of a growing cache has no length; set samples_per_epoch, or fixed=True"
            )
        return steps

    @property
    def report(self) -> Report:
        """What was delivered: the latest epoch, reuse, coverage, what set the pace."""
        return self._engine.report

    def close(self) -> None:
        """End the threads and free the snapshots; a later iteration starts anew."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {"options": self._options, "as_tuple": self._as_tuple}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._options, self._as_tuple = state["options"], state["as_tuple"]
        self._open()
