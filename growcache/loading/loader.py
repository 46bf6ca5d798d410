"""The loader that all frameworks share."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

from growcache.errors import ConfigError
from growcache.loading.consumer import Consumer
from growcache.loading.framework import NUMPY, Framework, Transfer
from growcache.loading.maps import Verify
from growcache.loading.options import (
    Gather,
    LoaderOptions,
    Ranks,
    RankShare,
    field_names,
    find_ranks,
    unknown_field,
)
from growcache.loading.ragged import RaggedStyle
from growcache.loading.report import Report
from growcache.loading.resume import (
    MISSING_SHARDS,
    MissingShards,
    Position,
    epoch_rows_left,
)
from growcache.loading.transform import TIMEOUT_SECONDS
from growcache.loading.waiting import cached_classes, wait_for_samples


def refuse_torch_worker() -> None:
    """Raise ConfigError in a worker process of torch's `DataLoader`."""
    module = sys.modules.get("torch.utils.data")
    worker = None if module is None else module.get_worker_info()
    if worker is not None:
        raise ConfigError(
            f"a DataLoader with num_workers={worker.num_workers} iterates over a growcache loader "
            "in its worker processes, each of which would deliver every sample; expected "
            "num_workers=0: growcache makes batches concurrently with the loop by itself. For trainers "
            "that ask for a DataLoader (Lightning, Accelerate, Hugging Face), use "
            "growcache.torch.EpochDataLoader; processes for a transform are the num_workers of the "
            "growcache loader",
            code="GC601",
        )


class Loader:
    """Epochs over a growing cache; a framework's loader decides the type of its batches.

    Attributes:
        framework: the functions that the front door lends.
    """

    framework: ClassVar[Framework] = NUMPY

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
        batch_transform: Callable[[Any], Any] | None = None,
        fields: Sequence[str] | None = None,
        as_tuple: Sequence[str] | None = None,
        ragged: RaggedStyle = "offsets",
        rank: int | None = None,
        world_size: int | None = None,
        job: str = "default",
        num_workers: int = 0,
        gather: Gather = "auto",
        verify: Verify = "first",
        device: Any = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        journal: str | os.PathLike[str] | None = None,
    ) -> None:
        """Take the arguments; threads and processes start with the first iteration.

        Args:
            path: of the cache directory; it need not exist yet.
            batch_size: samples per batch.
            min_samples: wait until this many are cached, or the whole population is.
            samples_per_epoch: None makes an epoch of everything that is cached, so it
                grows; a number makes every epoch of that many samples over all ranks, in whole
                batches unless ``drop_last`` is False: part of a pass over the cache or
                several, with the cursor carried over.
            seed: of the order, and of the transform's generators.
            shuffle: False gives shards by number and samples as they were drawn.
            drop_last: leave a last, smaller batch out.
            fixed: wait until the cache is complete; then every epoch is one pass in order,
                and its last batch is kept. For validation.
            transform: ``function(sample, rng, origin)``, called at every delivery, in threads
                or in the processes of ``num_workers``; arguments but the first go by name and
                may be left out. ``sample`` is a dict of arrays of its own (and of bytes and
                str, as cached), ``rng`` a generator from (seed, pass, position), ``origin``
                the sample's `growcache.Origin`. It returns a dict of arrays of equal shapes;
                bytes, str, and fields named as a ragged one of the cache may differ.
            batch_transform: ``function(batch)``, called with each batch, a dict, before
                ``as_tuple``, in the thread that makes batches, so that the loop does not
                wait for it. Its result is delivered.
            fields: names of the cache's fields that are wanted; the others are not read.
            as_tuple: names of fields; batches are tuples of these instead of dicts.
            ragged: how fields whose values differ in size come. ``offsets``: ``x`` holds
                all values back to back, ``[total, *inner]``, value i being
                ``x[x_offsets[i]:x_offsets[i + 1]]``; where other dimensions than the first
                alone are ragged, ``x`` is flat, the offsets count its numbers, and
                ``x_shapes`` int64 [batch, rank] has the shapes. ``pad``: ``x`` ``[batch, longest, *inner]`` with zeros after each
                value, and its sizes in ``x_lengths``, int64 [batch], or [batch, k] for k
                ragged dimensions. ``list``: a list of arrays. bytes come as uint8, in
                lists as bytes; str always in lists, which no loss takes: ``classes`` of ``source.labels``
                makes numbers of texts.
            rank: of this process among the ``world_size`` of its job. All ranks make the
                same number of steps, and together they deliver what one process would. None
                asks torch.distributed (PyTorch's loader) and then the variables ``RANK`` and
                ``WORLD_SIZE``; ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE`` say which ranks are on
                this machine, and share its cache. Growing epochs over several machines need
                torch.distributed, by which all agree on their length. With ``fixed``, or without ``drop_last``,
                ``_valid`` bool [batch] is False for samples that only fill a batch up.
            world_size: goes with ``rank``; 1 makes a loader for this process alone.
            job: in whose name uses are counted; each training on a cache needs its own.
            num_workers: processes that call ``transform``, and do nothing else; 0: threads do, which
                is as fast where the function releases the interpreter's lock. The batches
                are the same. Functions of modules travel by name, those of scripts
                and notebooks by value, so no ``__main__`` guard is needed.
            gather: where batches are put together. ``thread``: in a thread of this process.
                ``process``: in a process of growcache's own, through shared memory; for
                loops whose own Python keeps the thread waiting for the interpreter's lock.
                ``auto``: begins with the thread, and changes where measurement says so.
            verify: ``first`` checks a shard when this process first maps it, ``always`` in
                every pass.
            device: where batches are delivered, such as ``"cuda"`` or ``"cuda:1"``; PyTorch's
                loader alone has any. They are copied there concurrently with the loop, after
                ``batch_transform``; large columns that it hands on as they are come from
                page-locked memory. Up to 176 MB (360 MB with ``gather="thread"``), or five batches
                if those are more, are there, the loop's among them. Not yet run on a GPU.
                ``"cuda"`` is the device that is current in the loop's thread when it first
                iterates. None leaves them in memory.
            timeout_seconds: that ``transform`` may take for a sample before a warning names the
                sample; training goes on waiting for it.
            journal: a file that is appended to, such that `growcache.replay` can make any batch
                again. It takes 24 bytes a shard and pass, and some tens an object of the store, once.
                Of several ranks each writes its own, named by its rank.

        Raises:
            ConfigError: arguments that cannot be meant.
        """
        self._as_tuple = field_names("as_tuple", as_tuple)
        self._rank_arguments = (rank, world_size)
        self._device = device
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
            batch_transform=batch_transform,
            fields=field_names("fields", fields),
            ragged=ragged,
            job=job,
            num_workers=num_workers,
            gather=gather,
            verify=verify,
            timeout_seconds=timeout_seconds,
            journal=journal,
            ranks=self._ranks(),
        )
        self._loaded: tuple[Position, MissingShards] | None = (
            None  # and nothing delivered since
        )
        self._transfer = self._transfer_to(device)
        self._consumer = self._new_consumer()

    def _transfer_to(self, device: Any) -> Transfer | None:
        """Return the transfer to a device; overridden by frameworks that have devices."""
        if device is not None:
            raise ConfigError(
                f"device: arrays are in memory, found {device!r}; growcache.torch.EpochLoader "
                "delivers on devices",
                code="GC601",
            )
        return None

    def _new_consumer(self) -> Consumer:
        framework, transfer = self.framework, self._transfer
        if transfer is not None:
            framework = replace(framework, transfer=transfer, allocate=transfer.allocate)
        return Consumer(self._options, framework)

    def _ranks(self) -> Ranks:
        return find_ranks(*self._rank_arguments, self.framework.ranks(), os.environ)

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over the next epoch.

        Raises:
            ConfigError: this is a worker process of torch's DataLoader.
        """
        refuse_torch_worker()
        return self._epoch()

    def _epoch(self) -> Iterator[Any]:
        self._settle()
        self._loaded = None
        transfer = self._transfer
        if transfer is not None:
            transfer.begin()
        elif self._as_tuple is None:
            yield from self._consumer.epoch()
            return
        for batch in self._consumer.epoch():
            chosen = batch if transfer is None else transfer.receive(batch)
            del batch  # or its memory would be held for one step longer
            if self._as_tuple is not None:
                chosen = self._tuple(chosen)
            yield chosen
            del chosen

    def _settle(self) -> None:
        """Look for ranks again while none are known: trainers may join processes late."""
        if self._options.ranks.explicit:
            return
        ranks = self._ranks()
        if not ranks.explicit:
            return
        saved = None if self._loaded is None else self._loaded[0].to_dict(self._options)
        self._consumer.close()
        self._options = replace(self._options, ranks=ranks)
        self._consumer = self._new_consumer()
        if saved is not None and self._loaded is not None:
            self.load_state_dict(saved, self._loaded[1])

    def _tuple(self, batch: dict[str, Any]) -> tuple[Any, ...]:
        assert self._as_tuple is not None
        try:
            return tuple(batch[name] for name in self._as_tuple)
        except KeyError as error:
            raise ConfigError(
                f"as_tuple: {unknown_field(error.args[0], list(batch))}", code="GC601"
            ) from None
        except TypeError:
            raise ConfigError(
                f"as_tuple needs a dict, but batch_transform returned {type(batch).__name__}",
                code="GC601",
            ) from None

    def __len__(self) -> int:
        """Return the batches of an epoch; for ``fixed`` this waits for the whole cache.

        Raises:
            TypeError: epochs grow, so there is no such number.
        """
        share = self.rank_share()
        if share is None:
            raise TypeError(
                "an epoch of a growing cache has no length; set samples_per_epoch, or fixed=True"
            )
        return share.steps

    def rank_share(self) -> RankShare | None:
        """Return this rank's share of an epoch; None where epochs grow.

        For ``fixed`` this waits for the whole cache.
        """
        options = self.options
        samples = options.samples_per_epoch
        if options.fixed:
            view = wait_for_samples(
                options.root, options.min_samples, complete=True, rank=options.ranks.rank
            )
            samples = view.totals.samples
        return None if samples is None else options.rank_share(samples)

    def rest_share(self) -> RankShare | None:
        """Return this rank's share of the next iteration, which may be the rest of an epoch.

        None where epochs grow.
        """
        whole, loaded = self.rank_share(), self._consumer.loaded
        if whole is None or loaded is None:
            return whole
        rows = epoch_rows_left(loaded, self._options)
        return whole if rows is None else self._options.rank_share(rows)

    @property
    def step(self) -> int:
        """Batches that were delivered of the epoch in which the loader stands."""
        return self._consumer.step

    @property
    def global_step(self) -> int:
        """Batches that were delivered in all epochs, also by the loaders whose states were loaded.

        The batch that was received last is step ``global_step - 1`` of the journal.
        """
        return self._consumer.global_step

    @property
    def options(self) -> LoaderOptions:
        """The arguments, with the ranks as they are known by now."""
        self._settle()
        return self._options

    @property
    def classes(self) -> dict[str, list[str]]:
        """The names that the numbers of a field stand for, of each field of the cache that has classes.

        ``names[i]`` is the name of class ``i``. Waits until the cache knows its samples.
        """
        return cached_classes(self._options.root)

    @property
    def report(self) -> Report:
        """Counts of deliveries: the latest epoch, reuse, coverage, and the bottleneck."""
        return self._consumer.report

    def metrics(self, prefix: str = "data/") -> dict[str, float]:
        """Return the numbers of the report by name, for TensorBoard, W&B, MLflow and the like.

        Nothing is logged: give them to the tracker with the metrics of a step of your own.

        Args:
            prefix: of each name; trackers group by what stands before the slash.
        """
        return self.report.metrics(prefix)

    def state_dict(self) -> dict[str, Any]:
        """Return this loader's position: after the batch that was delivered last.

        Plain values, for `torch.save` as for `json.dumps`. After a batch, `load_state_dict`
        makes a loader deliver the very batches that this one would have delivered for the rest
        of its pass, in this process or another, on this machine or another: the same samples,
        in the same order, with the same generators for the transform. Where
        ``samples_per_epoch`` makes an epoch go on into another pass, and between epochs, a new
        snapshot follows, as ever. Its order depends on the state and on the shards cached then.

        Uses and the figures of `report` are not part of it. A journal is synced, so a power cut loses
        nothing of the steps before the state.

        Raises:
            JournalError: it cannot be written.
        """
        self._consumer.note_state()
        return self._consumer.position().to_dict(self._options)

    def load_state_dict(
        self, state: Mapping[str, Any], missing: MissingShards = "refetch"
    ) -> None:
        """Continue from the position of another loader: the next iteration is the rest of its epoch.

        After the last batch of an epoch that rest is empty, and the iteration after it
        begins the next one. Shards that are cached still are leased with the next iteration.

        Args:
            state: of `state_dict`, of a loader with the same batch_size, seed, shuffle,
                drop_last, samples_per_epoch and fixed. The functions must be the same, too. Of
                another number of ranks: what is left of the pass is dealt anew. Each rank of a
                machine may load the state of any of its ranks.
            missing: the action where shards that the rest of the pass needs are not cached
                (any more). ``refetch``: have the service draw them again, and wait for that.
                ``substitute``: put other shards in their places, as far as there are others.
                ``error``: raise CacheError.

        Raises:
            ConfigError: no such state, other arguments, or another cache's.
            CacheError: shards are gone; a loss that is found only when the next iteration
                leases them is raised there.
        """
        if missing not in MISSING_SHARDS:
            raise ConfigError(
                f"missing must be one of {', '.join(MISSING_SHARDS)}, found {missing!r}",
                code="GC601",
            )
        loaded = Position.from_dict(state, self.options)
        self._consumer.reset(loaded, missing)
        self._loaded = loaded, missing

    def close(self) -> None:
        """End threads and processes, and free the snapshots; a later iteration starts anew."""
        self._consumer.close()

    def __repr__(self) -> str:
        size = self._options.batch_size
        return f"{type(self).__name__}({str(self._options.path)!r}, batch_size={size})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        names = ("_options", "_as_tuple", "_rank_arguments", "_device")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        # In another process it may be another rank.
        self._options = replace(self._options, ranks=self._ranks())
        self._loaded = None
        self._transfer = self._transfer_to(self._device)
        self._consumer = self._new_consumer()
