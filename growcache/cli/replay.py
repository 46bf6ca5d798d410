"""``growcache replay``: the samples of a training step, and whether the store still has them."""

from __future__ import annotations

import asyncio
import json as plain_json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import typer

from growcache.cache.sidecar import version_of
from growcache.cli.terminal import fold_to_width, print_json, spinner
from growcache.config import Config
from growcache.config_text import load_config
from growcache.errors import ConfigError, ObjectMissingError, StoreError
from growcache.formats.base import endless_entry
from growcache.humanize import plural
from growcache.loading.journal import Journal
from growcache.replays import Replay, replay
from growcache.sampling.sources import first_urls, source_of_url
from growcache.schema import Array
from growcache.store.contract import Entry
from growcache.store.opening import open_store
from growcache.store.store import RemoteStore
from growcache.usercode import printable

MOST_ASKED = 16  # objects looked up at once


def show_steps(journal: Path, rank: int, *, json: bool) -> None:
    found = Journal.read(journal, rank)
    last = max((stretch.first.seconds for stretch in found.stretches), default=None)
    if json:
        values = {"steps": found.steps, "sessions": found.sessions, "updated_at": last}
        lost = [[one.start, one.stop] for one in found.lost]
        print_json(plain_json.dumps({**values, "lost": lost}).encode())
        return
    at = "" if last is None else f", the last at {_time(last)}"
    typer.echo(
        f"{journal} has {plural(found.steps, 'step')} (from 0) of "
        f"{plural(found.sessions, 'run')}{at}; show one with --step N"
    )
    if found.damage:
        typer.echo(f"{journal} is damaged: {found.damage_words}")


def replay_step(
    config: Path,
    journal: Path,
    step: int,
    *,
    rank: int,
    out: Path | None,
    cache: Path | None,
    check: bool,
    json: bool,
) -> int:
    settings = load_config(config, environment=os.environ)
    with spinner(sys.stderr, f"rebuilding step {step} …"):
        found = replay(settings, journal, step, rank=rank, cache=cache)
        changed = _changed_objects(settings, found.objects) if check else {}
    if out is not None:
        _write_arrays(out, found.batch)
    if json:
        # A local file's name need not be valid Unicode, which orjson demands.
        print_json(plain_json.dumps(_json_values(found, changed)).encode())
    else:
        typer.echo(_text(found, changed))
    return 1 if changed else 0


# -------------------------------------------------------------------- changed objects


def _changed_objects(config: Config, objects: Sequence[Entry]) -> dict[tuple[int, str], str]:
    """Return the states of changed objects, by store and key."""
    try:
        answers = asyncio.run(_current_states(config, objects))
    except StoreError as error:
        text = printable(f"it is unknown whether the objects have changed since: {error}")
        typer.echo(fold_to_width(text, sys.stderr), err=True)
        return {}
    pairs = zip(objects, answers, strict=True)
    return {(entry.store, entry.key): answer for entry, answer in pairs if answer}


async def _current_states(config: Config, objects: Sequence[Entry]) -> list[str]:
    seconds = config.sampling.timeout_seconds
    stores = [
        None if source.dataset else open_store(source, timeout_seconds=seconds)
        for source in config.sources
    ]
    firsts, slots = first_urls(config.sources), asyncio.Semaphore(MOST_ASKED)

    async def state(entry: Entry) -> str:
        number = source_of_url(firsts, entry.store)
        if entry.key == endless_entry(config.sources[number].format).key:
            return ""  # a user's function drew without objects
        store = stores[number]
        if store is None:
            return ""  # a Dataset's indexes have no version to compare
        own = replace(entry, store=entry.store - firsts[number])
        async with slots:
            return await _state(store, own)

    try:
        return await asyncio.gather(*map(state, objects))
    finally:
        for store in filter(None, stores):
            await store.close()


async def _state(store: RemoteStore, entry: Entry) -> str:
    try:
        now = await store.current_entry(entry)
    except ObjectMissingError:
        return "gone from the store"
    before = version_of(entry.etag, entry.size, entry.mtime)
    found = version_of(now.etag, now.size, now.mtime)
    return "" if before == found else f"rewritten since: now {found}"


# ----------------------------------------------------------------------------- output


def _text(found: Replay, changed: dict[tuple[int, str], str]) -> str:
    shards = {sample.shard for sample in found.samples}
    again = {sample.shard for sample in found.samples if sample.drawn_again}
    head = (
        f"step {found.step} is batch {found.epoch_step} of epoch {found.epoch}: "
        f"{plural(len(found.samples), 'sample')} of {plural(len(shards), 'shard')}"
    )
    notes = [
        f"{len(again)} of them drawn again from the store" if again else "",
        "" if found.known else "the run may have ended before it",
        f"{plural(found.earlier, 'earlier run')} had this step, too" if found.earlier else "",
        f"{plural(len(changed), 'object')} changed since" if changed else "",
    ]
    lines = ["; ".join([head, *filter(None, notes)])]
    width = max(len(f"{s.shard}:{s.row}") for s in found.samples)
    for i, sample in enumerate(found.samples):
        origin = sample.origin
        place = f"{sample.shard}:{sample.row}".ljust(width)
        where = f"{i:4}  {place}  {printable(origin.key)} [{origin.start}:{origin.stop}]"
        state = changed.get((sample.store, origin.key))
        more = [origin.etag, None if sample.valid else "pads the batch", state]
        lines.append("  ".join([where, *(printable(text) for text in more if text)]))
    return "\n".join(lines)


def _json_values(found: Replay, changed: dict[tuple[int, str], str]) -> dict[str, Any]:
    names = ("step", "epoch", "epoch_step", "known", "earlier")
    samples = [
        {
            **asdict(sample.origin),
            "shard": sample.shard,
            "row": sample.row,
            "valid": sample.valid,
            "drawn_again": sample.drawn_again,
            "changed": changed.get((sample.store, sample.origin.key)),
        }
        for sample in found.samples
    ]
    values = {name: getattr(found, name) for name in names}
    return {**values, "updated_at": found.seconds, "samples": samples}


def _time(seconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _write_arrays(out: Path, batch: dict[str, Any]) -> None:
    arrays: dict[str, Array] = {}
    for name, value in batch.items():
        arrays |= _arrays(name, value) if isinstance(value, list) else {name: value}
    try:
        with out.open("wb") as stream:
            np.savez(stream, **arrays)  # type: ignore[arg-type]
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror}", code="GC106") from None


def _arrays(name: str, values: list[Any]) -> dict[str, Array]:
    """Return a list of texts, bytes or arrays as arrays: values back to back, and their starts."""
    if values and isinstance(values[0], str):
        return {name: np.array(values)}
    flat = [np.frombuffer(v, np.uint8) if isinstance(v, bytes) else v for v in values]
    return {
        name: np.concatenate([value.ravel() for value in flat]),
        f"{name}_offsets": np.cumsum([0, *(value.size for value in flat)]),
        f"{name}_shapes": np.array([value.shape for value in flat]),
    }
