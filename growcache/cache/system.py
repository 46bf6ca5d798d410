"""The operating system: memory, processes, SIGTERM, file events.

A recorded pid may belong to another process by now. So the kernel is asked which processes have
a lock file open, and a descriptor holds a process while it is killed.

By default SIGTERM ends a process at once, and its leases would look like those of a dead
reader. So the signal gets a handler, but only if there is none: a user's own handler takes
precedence, in Python or in C, whenever it was set. Afterwards the signal ends the process, so
its parent sees no other exit status. Frameworks that call the previous handler first compare it
with the default, so this one is equal to the default. Python calls handlers only in the main
thread, which may hang in C, for example in a collective operation. So a second thread ends the
process after a second.
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol
from weakref import WeakSet

if TYPE_CHECKING:
    from watchdog.observers.api import BaseObserver


PROC_FOLDER, CGROUP_FOLDER = Path("/proc"), Path("/sys/fs/cgroup")


class CgroupFiles(NamedTuple):
    limit: str
    used: str
    file_pages: tuple[str, ...]


CGROUP_V1 = CgroupFiles(
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_active_file", "total_inactive_file"),
)
CGROUP_V2 = CgroupFiles("memory.max", "memory.current", ("active_file", "inactive_file"))


def memory_bytes(proc: Path = PROC_FOLDER, groups: Path = CGROUP_FOLDER) -> int:
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = (_number_in_file(where / names.limit) for where, names in _cgroups(proc, groups))
    return min([machine, *(limit for limit in limits if limit is not None)])


def available_memory_bytes(proc: Path = PROC_FOLDER, groups: Path = CGROUP_FOLDER) -> int:
    """Return free memory, plus page cache that the kernel can reclaim."""
    machine = _numbers_by_name(proc / "meminfo").get("MemAvailable:")
    # In KiB. Kernels without this line can reclaim all of it.
    found = [memory_bytes(proc, groups) if machine is None else 1024 * machine]
    for where, names in _cgroups(proc, groups):
        limit, used = _number_in_file(where / names.limit), _number_in_file(where / names.used)
        if limit is not None and used is not None:
            stat = _numbers_by_name(where / "memory.stat")
            found.append(limit - used + sum(stat.get(name, 0) for name in names.file_pages))
    return max(0, min(found))


def _cgroups(proc: Path, groups: Path) -> Iterator[tuple[Path, CgroupFiles]]:
    """Yield the groups whose limits apply to this process: its own and their parents."""
    for line in _lines_of_file(proc / "self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mounts = [groups, groups / "unified"]
        elif "memory" in controllers.split(","):
            mounts = [groups / "memory"]
        else:
            continue
        for mount in mounts:
            # A container may see its group as the root, without the path to it.
            for where in _cgroup_parents(mount, path):
                yield where, CGROUP_V1 if controllers else CGROUP_V2


def _cgroup_parents(mount: Path, path: str) -> Iterable[Path]:
    parts = [part for part in path.split("/") if part not in ("", "..")]
    return [mount.joinpath(*parts[:n]) for n in range(len(parts), -1, -1)]


def _lines_of_file(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # the kernel, group or figure does not exist
        return []


def _number_in_file(path: Path) -> int | None:
    for line in _lines_of_file(path):
        if line.strip().isdigit():
            return int(line)
    return None


def _numbers_by_name(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in _lines_of_file(path))
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) > 1 and pair[1].isdigit()}


STOPPED_STATES = frozenset("tT")  # by a signal or a debugger
ENDED_STATES = frozenset("ZX")  # although its parent has not collected it yet
SAMPLER_COMMAND = [b"-m", b"growcache", b"sampler"]  # end of its command line
KILL_SECONDS = 1.0  # for a killed process to end, even on a busy machine

_PROC = Path("/proc")


def is_process_stopped(pid: int) -> bool:
    return _process_state(pid) in STOPPED_STATES


def is_process_running(pid: int) -> bool:
    state = _process_state(pid)
    return bool(state) and state not in ENDED_STATES


def _process_state(pid: int) -> str:
    try:
        stat = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    # The name, in parentheses, may contain any character, even spaces and parentheses.
    fields = stat.rpartition(")")[2].split()
    return fields[0] if fields else ""


def process_has_open(pid: int, path: Path) -> bool:
    with suppress(OSError):
        wanted = path.stat()
        return any(os.path.samestat(found, wanted) for found in _files_of_process(pid))
    return False


def end_samplers(lock: Path) -> tuple[int, ...]:
    """Kill the samplers that have a lock file open; return their pids after they have ended.

    Only the holder of ``supervisor.lock`` may call this, because then all of them belong to a
    dead supervisor. Those of other users, hosts and containers are invisible.
    """
    return tuple(pid for pid in _other_pids() if _end_sampler(pid, lock))


def _end_sampler(pid: int, lock: Path) -> bool:
    if not _is_sampler(pid, lock):  # most are not, and need no descriptor
        return False
    try:
        process = os.pidfd_open(pid)
    except OSError:  # it has ended, or the kernel lacks these descriptors
        return False
    try:
        if not _is_sampler(pid, lock):  # from here on it is the same process
            return False
        signal.pidfd_send_signal(process, signal.SIGKILL)
        select.select([process], [], [], KILL_SECONDS)
        return True
    except OSError:
        return False
    finally:
        os.close(process)


def _is_sampler(pid: int, lock: Path) -> bool:
    try:
        if (_PROC / str(pid)).stat().st_uid != os.geteuid():
            return False
        words = (_PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return words[-4:-1] == SAMPLER_COMMAND and process_has_open(pid, lock)


def _other_pids() -> Iterator[int]:
    for path in _PROC.iterdir():
        if path.name.isdecimal() and int(path.name) != os.getpid():
            yield int(path.name)


def _files_of_process(pid: int) -> Iterator[os.stat_result]:
    for descriptor in (_PROC / str(pid) / "fd").iterdir():
        with suppress(OSError):  # it was closed meanwhile
            yield descriptor.stat()


PROC_STATUS = Path("/proc/self/status")
MAIN_THREAD_SECONDS = 1.0  # for the main thread

_sigterm_calls: list[Callable[[], None]] = []
_sigterm_lock = threading.Lock()  # held from the moment one thread starts to end the process
_wakeup_descriptor = -1  # through which a thread learns of signals


def at_sigterm(call: Callable[[], None]) -> None:
    """Run an action when SIGTERM ends the process, last in first out, whatever other threads do."""
    _sigterm_calls.insert(0, call)


def release_at_sigterm() -> None:
    """Install the handler of `at_sigterm` in the main thread, if the signal has no handler."""
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and not _is_caught_outside_python():
        with suppress(ValueError):  # in a sub-interpreter
            signal.signal(signal.SIGTERM, _sigterm_handler)
            _start_second_thread()


def _is_caught_outside_python() -> bool:
    try:
        lines = PROC_STATUS.read_text().splitlines()
    except OSError:
        return False
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


class _SigtermHandler:
    """Ends the process. It compares equal to the default handler, which it replaces."""

    def __call__(self, number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        if _sigterm_lock.acquire(blocking=False):  # else the other thread is about to end it
            _end_process()

    def __eq__(self, other: object) -> bool:
        return other is self or other is signal.SIG_DFL

    __hash__ = object.__hash__


_sigterm_handler = _SigtermHandler()


def _end_process() -> None:
    for call in _sigterm_calls:
        with suppress(Exception):  # it ends now, even if the actions fail
            call()
    ctypes.CDLL(None).signal(signal.SIGTERM, None)  # the default, from any thread
    os.kill(os.getpid(), signal.SIGTERM)
    if os.getpid() == 1:  # in a container the kernel drops signals to pid 1 without a handler
        os._exit(128 + signal.SIGTERM)


def _start_second_thread() -> None:
    global _wakeup_descriptor
    told, telling = os.pipe()
    os.set_blocking(telling, False)
    before = signal.set_wakeup_fd(telling, warn_on_full_buffer=False)
    if before != -1:
        signal.set_wakeup_fd(before)
        os.close(told)
        os.close(telling)
        return
    _wakeup_descriptor = telling
    threading.Thread(
        target=_end_for_main_thread, args=(told,), name="growcache-sigterm", daemon=True
    ).start()


def _end_for_main_thread(told: int) -> None:
    while numbers := os.read(told, 64):
        if signal.SIGTERM not in numbers or not _is_handler_ours():
            continue
        time.sleep(MAIN_THREAD_SECONDS)
        if _is_handler_ours() and _sigterm_lock.acquire(blocking=False):
            _end_process()


def _is_handler_ours() -> bool:
    return signal.getsignal(signal.SIGTERM) is _sigterm_handler


def _forget_in_child() -> None:
    """Forget the actions in a forked child, which holds no leases, so that it ends without delay."""
    if _is_handler_ours():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if _wakeup_descriptor != -1 and (found := signal.set_wakeup_fd(-1)) != _wakeup_descriptor:
        signal.set_wakeup_fd(found)  # else the parent would get the child's signals


os.register_at_fork(after_in_child=_forget_in_child)


class ServiceListener(Protocol):
    def service_changed(self, root: Path, reason: str | None) -> None:
        """Called when the service of a resolved path started (None), or with the reason of its end."""


service_listeners: WeakSet[ServiceListener] = WeakSet()

_service_end_reasons: dict[Path, str] = {}  # by the resolved path of the cache


def service_started(root: str | os.PathLike[str]) -> None:
    note_service_end(root, None)


def service_failed(root: str | os.PathLike[str], reason: str) -> None:
    note_service_end(root, reason)


def note_service_end(root: str | os.PathLike[str], reason: str | None) -> None:
    resolved = _directory(root)
    if reason is None:
        _service_end_reasons.pop(resolved, None)
    else:
        _service_end_reasons[resolved] = reason
    for listener in list(service_listeners):
        listener.service_changed(resolved, reason)


def service_end_reason(root: str | os.PathLike[str]) -> str | None:
    return _service_end_reasons.get(_directory(root))


def _directory(root: str | os.PathLike[str]) -> Path:
    # Not above, because processes import this module first.
    from growcache.cache.files import directory_of

    return directory_of(Path(root)).resolve()


_CHANGE_EVENTS = frozenset({"created", "deleted", "modified", "moved"})

_log = logging.getLogger(__name__)


def _is_worth_logging(record: logging.LogRecord) -> bool:
    """Drop watchdog's complaint about events during its stop."""
    return "when the thread is inactive" not in record.msg


class DirectoryWatch:
    def __init__(self, observer: BaseObserver | None) -> None:
        self._observer = observer

    def stop(self) -> None:
        if self._observer is not None:
            self._observer.stop()
            self._observer.join()


def watch_directory(directory: Path, told: Callable[[], None]) -> DirectoryWatch:
    """Call ``told`` in another thread at every change in a directory, without its subdirectories.

    At the system's limit of watches nothing is reported, so the caller must also poll
    occasionally.
    """
    from watchdog.events import DirModifiedEvent, FileSystemEvent, FileSystemEventHandler
    from watchdog.observers import Observer

    class Tell(FileSystemEventHandler):
        def on_any_event(self, event: FileSystemEvent) -> None:
            # Only these events, because a look opens and closes files, and sets attributes of
            # SQLite's. A caller that reacts to those would look forever.
            if event.event_type in _CHANGE_EVENTS and type(event) is not DirModifiedEvent:
                told()

    # Once if repeated.
    logging.getLogger("watchdog.observers.inotify").addFilter(_is_worth_logging)
    observer = Observer()
    try:
        observer.schedule(Tell(), str(directory))
        observer.start()
    except OSError as error:
        _log.info("cache watch gets no file events and polls instead: %s", error)
        return DirectoryWatch(None)
    return DirectoryWatch(observer)
