"""The service as a child process of the trainer, which starts and ends with it.

The child is the same supervisor as ``growcache run``. The trainer holds the other end of its
standard input, so the trainer's death ends it. It has its own session.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, TypeAlias

from growcache.cache import system
from growcache.cache.files import CacheLayout
from growcache.cache.locks import is_locked
from growcache.cache.side_files import read_identity
from growcache.cache.status import read_status
from growcache.cache.status_model import Status
from growcache.config import Config
from growcache.config_text import from_json_value, load_config, to_json_value
from growcache.errors import (
    CacheBusyError,
    FingerprintError,
    GrowcacheError,
    SamplingError,
    coded_text,
)
from growcache.launcher import with_launched_node
from growcache.sampling.config_reload import ConfigFile
from growcache.sampling.fingerprint import identify
from growcache.sampling.messages import (
    FORMAT,
    LABELS,
    TRANSFORM,
    Message,
    pack,
    refusal_error,
    refusal_message,
    unpack,
)
from growcache.sampling.sizing import stored_sizing, with_configured_sizes
from growcache.usercode import child_environment

STOP_SECONDS = 20.0

_Source: TypeAlias = str | os.PathLike[str] | Mapping[str, Any] | Config

log = logging.getLogger("growcache")


@contextlib.contextmanager
def serve(source: _Source, *, replace: bool = False) -> Iterator[Config]:
    """Run the service as a child of this process during the ``with`` block.

    If a service with the same configuration already runs on the cache, it is joined, and it
    continues to run after the block.

    Args:
        source: A configuration, or the path of its file; see `growcache.load_config`.
        replace: If another configuration filled the cache, let new samples replace the old ones
            as they are drawn.

    Yields:
        The checked configuration. Pass ``config.cache.path`` to loaders.

    Raises:
        ConfigError: The configuration is not valid, or a service with another configuration
            runs on the cache.
        GrowcacheError: The service did not start.

    Example::

        with growcache.serve("growcache.yaml") as config:
            loader = EpochLoader(config.cache.path, batch_size=64)
    """
    config = with_launched_node(load_config(source, environment=os.environ))
    with served(config, file=_path_of(source), replace=replace):
        yield config


@contextlib.contextmanager
def served(
    config: Config,
    *,
    file: str | None = None,
    replace: bool = False,
    variables: Mapping[str, str] | None = None,
) -> Iterator[None]:
    """Run or join the service of a checked configuration.

    ``variables`` are added to the environment of the service.
    """
    if _joins(config):
        yield
        return
    child = _ServiceChild(config, file=file, replace=replace, variables=variables)
    try:
        yield
    finally:
        child.stop()


class Service:
    """A sampling service that `start` started, or that another program runs on the same cache.

    Attributes:
        config: The checked configuration.
    """

    def __init__(self, config: Config, child: _ServiceChild | None) -> None:
        self.config = config
        self._child = child  # None: another program runs the service

    def status(self) -> Status:
        """Return the status that ``growcache status`` shows.

        Its fields are those of ``--json``.
        """
        return read_status(self.config.cache.path)

    def stop(self) -> None:
        """Stop the service if this process started it.

        The cache stays. A second call does nothing.
        """
        _started.pop(self.config.cache.path.absolute(), None)
        if self._child is not None:
            self._child.stop()

    @property
    def running(self) -> bool:
        if self._child is None:
            return is_locked(CacheLayout(self.config.cache.path).supervisor_lock)
        return self._child.running

    def __repr__(self) -> str:
        whose = "" if self._child is not None else " (of another program)"
        state = "running" if self.running else "stopped"
        return f"<growcache service of {self.config.cache.path}: {state}{whose}>"


def start(source: _Source, *, replace: bool = False) -> Service:
    """Start the service as a child process, until `Service.stop` or the end of this process.

    Use it in notebooks, where no ``with`` block can span several cells; use `serve` in
    programs. If a cell runs again, it gets the service that it started before. If another
    program runs a service with the same configuration on the cache, that service is joined, and
    `Service.stop` does not stop it.

    Args:
        source: A configuration, or the path of its file; see `growcache.load_config`.
        replace: If another configuration filled the cache, let new samples replace the old ones
            as they are drawn.

    Returns:
        The service, with ``status()``, ``stop()``, ``running`` and its checked ``config``.

    Raises:
        ConfigError: The configuration is not valid, or a service with another configuration
            runs on the cache.
        GrowcacheError: The service did not start.

    Example::

        service = growcache.start("growcache.yaml")
        loader = EpochLoader(service.config.cache.path, batch_size=64)
    """
    config = with_launched_node(load_config(source, environment=os.environ))
    path = config.cache.path.absolute()
    joins = _joins(config)
    known = _started.get(path)
    if known is not None and known.running:
        return known
    child = None
    if not joins:
        child = _ServiceChild(config, file=_path_of(source), replace=replace)
    _started[path] = Service(config, child)
    return _started[path]


_started: dict[Path, Service] = {}


@atexit.register
def _stop_all() -> None:
    for service in list(_started.values()):
        service.stop()


def _path_of(source: _Source) -> str | None:
    """Return the absolute path of a file.

    The service follows the file, even if the trainer changes directory.
    """
    return str(Path(source).absolute()) if isinstance(source, str | os.PathLike) else None


class _ServiceChild:
    def __init__(
        self,
        config: Config,
        *,
        file: str | None,
        replace: bool,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        setup = {
            "config": to_json_value(config.model_dump()),
            "file": file,
            "replace": replace,
        }
        self._process = _start(setup, variables or {})
        self._pid = os.getpid()
        path = config.cache.path
        system.service_started(path)
        self._relay = threading.Thread(target=_relay, args=(self._process, path), daemon=True)
        self._relay.start()

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        if self._pid == os.getpid():  # a forked copy must not stop it
            end_child(self._process, STOP_SECONDS)
            self._relay.join()  # the pipe has ended by now


def _joins(config: Config) -> bool:
    """Whether a service with the same fingerprint runs on the cache.

    Raises:
        FingerprintError: A service with another fingerprint runs on it.
    """
    layout = CacheLayout(config.cache.path)
    if not is_locked(layout.supervisor_lock):
        return False
    running = read_identity(config.cache.path)
    if running is None:
        return True  # it has not measured its first object yet; its samples will show
    ranged = bool(running.sizes["ranged"])
    sizing = with_configured_sizes(config, stored_sizing(running.sizes), ranged=ranged)
    # Only the service and its samplers know these, because they import the user's code.
    digests = {name: running.parts.get(name) for name in (TRANSFORM, FORMAT, LABELS)}
    ours = identify(config, running.schema, sizing, digests, running.sizes)
    if ours.fingerprint != running.fingerprint:
        differing = "; ".join(running.differing(ours))
        raise FingerprintError(
            f"a service with another configuration runs on {config.cache.path}: {differing}"
        )
    return True


def _start(setup: Message, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "growcache", "serve"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        env={**child_environment(), **variables},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):  # it has died, as its missing answer shows
        process.stdin.write(pack(setup))
        process.stdin.flush()
    line = process.stdout.readline()
    if line and "error" not in (answer := unpack(line)):
        return process
    end_child(process, STOP_SECONDS)
    process.stdout.close()
    if line:
        raise _as_error(answer)
    raise SamplingError(
        f"the sampling service ended at its start ({_how_it_ended(process)}) and did not say "
        f"why; see its own messages above, or run: {sys.executable} -m growcache --version",
        code="GC504",
    )


def _as_error(answer: Message) -> GrowcacheError:
    if answer.get("kind") == "busy":
        return CacheBusyError(answer["error"])
    return refusal_error(answer)


def _relay(process: subprocess.Popen[bytes], path: Path) -> None:
    """Log the error that ends the service. The trainer continues with the cached samples."""
    assert process.stdout is not None
    reported = False
    with process.stdout as messages:
        for line in messages:
            reason = coded_text(_as_error(unpack(line)))
            log.error("the sampling service stopped: %s", reason)
            system.service_failed(path, reason)
            reported = True
    if process.wait() and not reported:
        how = f"the sampling service ended ({_how_it_ended(process)}) and did not say why"
        log.error(
            "%s; nothing new is drawn, and cached samples stay. See its own messages above; if "
            "memory ran out, lower sampling.workers",
            how,
        )
        system.service_failed(path, how)


def _how_it_ended(process: subprocess.Popen[bytes]) -> str:
    code = process.returncode
    return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"


def end_child(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Close the input of a child, so that it ends; kill it after ``seconds``."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def main() -> None:
    """Run the child: ``python -m growcache serve``."""
    from growcache.sampling.run_service import run_service

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer
    setup = unpack(sys.stdin.buffer.readline())
    config = Config.model_validate(from_json_value(setup["config"]))
    file = ConfigFile(Path(setup["file"]), (), os.environ) if setup["file"] else None
    say = sys.stdout.buffer
    messages = os.fdopen(os.dup(say.fileno()), "wb", buffering=0)
    os.dup2(2, 1)
    try:
        run_service(
            config,
            on_ready=lambda: _send(messages, {"ready": True}),
            parent=sys.stdin.fileno(),
            handle_interrupt=False,
            file=file,
            replace=setup["replace"],
        )
    except GrowcacheError as error:
        kind = "busy" if isinstance(error, CacheBusyError) else ""
        _send(messages, {**refusal_message(error), "kind": kind})
        sys.exit(error.exit_code)


def _send(messages: IO[bytes], message: Message) -> None:
    with contextlib.suppress(BrokenPipeError):
        messages.write(pack(message))
