"""The user's code on its way to nodes of a cluster, which may lack its modules.

cloudpickle transports it: modules that no installer put here by value, and installed packages
by name.
"""

from __future__ import annotations

import os
import pickle
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

from growcache.config import Config
from growcache.errors import ConfigError
from growcache.formats import is_user_format
from growcache.usercode import PICKLED, PICKLED_PATH, SENT_CODE, find_code


@dataclass(frozen=True, slots=True)
class SentCode:
    """Pickled code by name, and the pickle of a Dataset that was passed to `from_dataset`."""

    named: bytes
    dataset: bytes | None = None

    @contextmanager
    def adopted(self) -> Iterator[None]:
        """Let this process find the code: the Dataset during the block, and the rest permanently."""
        SENT_CODE.update(pickle.loads(self.named))
        if self.dataset is None:
            yield
            return
        with tempfile.NamedTemporaryFile(prefix="growcache-dataset-") as file:
            file.write(self.dataset)
            file.flush()
            os.environ[PICKLED_PATH] = file.name
            yield


def send_code(config: Config) -> SentCode:
    """Pickle the code that a configuration names.

    Raises:
        ConfigError: The code cannot be pickled.
    """
    names = code_names(config)
    found = {name: find_code(name, key) for name, key in names.items()}
    roots = {_root_module(one.found) for one in found.values()}
    with _by_value(roots):
        return SentCode(_pickled(found, ", ".join(found)), _sent_dataset(config))


def code_names(config: Config) -> dict[str, str]:
    """Return the names of the user's functions, each with its configuration key."""
    names: dict[str, str] = {}
    if config.sampling.transform is not None:
        names[config.sampling.transform] = "sampling.transform"
    for source in config.sources:
        if source.dataset is not None:
            names[source.dataset] = "source.dataset"
            continue
        for form, options in source.formats:
            names[form] = "source.format"
            names[str(options.get("decode"))] = "source.options.decode"
    return {
        name: key
        for name, key in names.items()
        if is_user_format(name) and not name.startswith(f"{PICKLED}:")
    }


def _sent_dataset(config: Config) -> bytes | None:
    path = os.environ.get(PICKLED_PATH)
    given = [source.dataset for source in config.sources if source.dataset is not None]
    if path is None or not any(name.startswith(f"{PICKLED}:") for name in given):
        return None
    # The program's own, in a file that only this user can write.
    held = pickle.loads(Path(path).read_bytes())
    kind = held["found"] if held["makes"] else type(held["found"])
    with _by_value({_root_module(kind)}):
        return _pickled(held, given[0])


def _root_module(found: Any) -> str:
    if not isinstance(found, type) and not hasattr(found, "__qualname__"):
        found = type(found)  # an instance
    return str(getattr(found, "__module__", "") or "").partition(".")[0]


@contextmanager
def _by_value(roots: set[str]) -> Iterator[None]:
    modules = [sys.modules[name] for name in sorted(roots) if _is_the_users(name)]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def _is_the_users(name: str) -> bool:
    """Whether a module was not installed, so that other machines may lack it."""
    module = sys.modules.get(name)
    if not isinstance(module, ModuleType) or name in {"", "__main__", "growcache"}:
        return False
    if name in sys.stdlib_module_names:
        return False
    path = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), "")
    installed = [sysconfig.get_path(kind) for kind in ("purelib", "platlib")]
    return not any(Path(path).is_relative_to(folder) for folder in installed)


def _pickled(value: Any, name: str) -> bytes:
    try:
        data: bytes = cloudpickle.dumps(value)
    except Exception as error:
        raise ConfigError(
            f"{name} cannot be sent to the nodes of a Ray cluster: {type(error).__name__}: {error}",
            code="GC109",
        ) from error
    return data
