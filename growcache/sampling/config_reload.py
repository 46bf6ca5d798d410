"""Follow the config file while the service runs.

Some settings change at once, and others need a restart.

A changed file is read after it has been stable for a moment, because some editors write it in
pieces. A file that cannot be read or applied is logged, and the settings stay as they were.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from growcache.cache.system import watch_directory
from growcache.config import Config
from growcache.config_text import from_json_value, load_config, to_json_value
from growcache.errors import ConfigError
from growcache.launcher import with_launched_node
from growcache.sampling.fingerprint import server_options

LIVE = (
    *("cache.max_bytes", "cache.min_free", "cache.min_uses"),
    *("cache.max_reuse", "cache.on_max_reuse"),
    *("sampling.max_egress", "sampling.max_bytes_per_second"),
)
LOOK_SECONDS = 1.0  # between looks without events, which may be lost or unavailable
SETTLE_SECONDS = 0.25  # for which a file must have been stable

_Signature = tuple[int, int, int] | None


@dataclass(frozen=True, slots=True)
class ConfigFile:
    path: Path
    overrides: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def load(self) -> Config:
        found = load_config(self.path, self.overrides, self.environment)
        return with_launched_node(found, self.environment)


def merged_config(running: Config, found: Config) -> tuple[Config, list[str]]:
    """Return the running configuration with the live changes, and the keys that need a restart.

    A removed key needs a restart, too, because a half-written file must not reset the bound.
    """
    before, after = _flat(running), _flat(found)
    changed = [key for key in after if before.get(key, ...) != after[key]]
    named = _named(found)
    live = [key for key in changed if key in named and _is_live(key, before, after)]
    values, new = running.model_dump(), found.model_dump()
    for key in live:
        *sections, name = key.split(".")
        _within(values, sections)[name] = _within(new, sections)[name]
    config = load_config(values) if live else running
    return config, [key for key in changed if key not in live]


def _is_live(key: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Whether a setting may change at run time, as a store's credentials may, but not its server."""
    if not _STORAGE.fullmatch(key):
        return key in LIVE
    return server_options(from_json_value(before[key])) == server_options(
        from_json_value(after[key])
    )


_STORAGE = re.compile(r"source(\.\d+)?\.storage_options")


def _within(values: Any, sections: Sequence[str]) -> Any:
    for section in sections:
        values = values[int(section) if section.isdigit() else section]
    return values


def _flat(config: Config) -> dict[str, Any]:
    """Return every setting by its dotted name, as a JSON value."""
    flat: dict[str, Any] = {}
    for section, value in to_json_value(config.model_dump()).items():
        for prefix, _, part in _sections(section, getattr(config, section), value):
            flat |= {f"{prefix}.{key}": inner for key, inner in part.items()}
        if not any(key.startswith(f"{section}.") for key in flat):
            flat[section] = value
    return flat


def _sections(section: str, model: Any, value: Any) -> Iterator[tuple[str, BaseModel, Any]]:
    if isinstance(model, BaseModel):
        yield section, model, value
    elif section == "source":
        for number, (one, inner) in enumerate(zip(model, value, strict=True)):
            yield f"{section}.{number}", one, inner


def _named(config: Config) -> set[str]:
    values = config.model_dump()
    return {
        f"{prefix}.{key}"
        for section in type(config).model_fields
        for prefix, model, _ in _sections(section, getattr(config, section), values[section])
        for key in model.model_fields_set
    }


class ConfigReload:
    def __init__(
        self,
        file: ConfigFile,
        running: Config,
        adopt: Callable[[Config], None],
        wake: Callable[[], None],
    ) -> None:
        self._file = file
        self._running = running
        self._adopt = adopt
        self._wake = wake
        self._stirred = True  # the file may have changed since it was read
        self._looked_at = 0.0
        self._seen: _Signature = None
        self._seen_at = time.monotonic()
        self._taken: _Signature | str = "never"
        self.restart_for: list[str] = []
        self._watch = watch_directory(file.path.parent, self._stir)

    def stop(self) -> None:
        self._watch.stop()

    def _stir(self) -> None:
        self._stirred = True
        self._wake()

    def look(self, now: float) -> list[str]:
        if not self._stirred and now - self._looked_at < LOOK_SECONDS:
            return []
        self._stirred, self._looked_at = False, now
        signature = _signature(self._file.path)
        if signature == self._taken:
            return []
        if signature != self._seen:
            self._seen, self._seen_at = signature, now
        if now - self._seen_at < SETTLE_SECONDS:
            self._stirred = True
            return []
        said = self._take()
        self._taken = signature  # not after a failure on a full disk, which is retried
        return said

    def _take(self) -> list[str]:
        path = self._file.path
        try:
            config, others = merged_config(self._running, self._file.load())
        except ConfigError as error:
            return [f"the change of the config is ignored: {_one_line(error)}"]
        self.restart_for = others
        said = (
            [f"{path} changed: restart the service for {', '.join(others)}"] if others else []
        )
        if config == self._running:
            return said
        try:
            self._adopt(config)
        except ConfigError as error:
            return [*said, f"the change of the config is ignored: {_one_line(error)}"]
        self._running = config
        return said


def _one_line(error: ConfigError) -> str:
    return "; ".join(str(error).splitlines())


def _signature(path: Path) -> _Signature:
    """Return values that differ after each write of the file, or None without a file."""
    try:
        found = path.stat()
    except OSError:  # it is being replaced, or missing, which reading will show
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
