"""Watches what Python does in growcache's processes; imported by each as its `sitecustomize`.

The environment says where to write (WATCHED_LOG), and below which folder files may be
written (WATCHED_CACHE). A process can act on the bytes of objects only through one
of these events, or through C code that raises no event.
"""

from __future__ import annotations

import os
import sys
from typing import Any

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
PATHS = {"os.mkdir": 1, "os.remove": 1, "os.rmdir": 1, "os.rename": 2, "os.link": 2}
PATHS |= {"os.symlink": 2, "os.truncate": 1, "os.chmod": 1, "shutil.rmtree": 1}
NEVER = {
    "pickle.find_class",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "marshal.loads",
}
# Python 3.13 and newer also load their built-in modules so.
IMPORTS = {"<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>"}
MARK = "EVIL"  # what hostile objects contain


def complaint(event: str, arguments: tuple[Any, ...], cache: str, role: str) -> str | None:
    """Return what is wrong with an event, if anything is."""
    if event in NEVER and not (event == "marshal.loads" and _importing()):
        return f"{event} {arguments!r:.200}"
    if event == "subprocess.Popen" and list(arguments[1])[1:] != ["-m", "growcache", "sampler"]:
        return f"{event} {arguments!r:.200}"
    if event in ("compile", "exec", "import") and MARK in _text(event, arguments):
        return f"{event} {_text(event, arguments):.200}"
    if event == "open":
        path, mode, flags = arguments
        writes = bool(flags & WRITES) if isinstance(flags, int) else "w" in str(mode)
        if writes and not _inside(path, cache):
            return f"open {path!r} {mode} {flags}"
    if event in PATHS:
        for path in arguments[: PATHS[event]]:
            if not _inside(path, cache):
                return f"{event} {path!r}"
    return None


def _text(event: str, arguments: tuple[Any, ...]) -> str:
    if event == "exec":
        code = arguments[0]
        return f"{code.co_names} {code.co_consts}" if hasattr(code, "co_names") else repr(code)
    return repr(arguments[0])


def _importing() -> bool:
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename in IMPORTS:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _inside(path: object, cache: str) -> bool:
    if isinstance(path, int) or path is None:
        return True
    plain = os.fsdecode(path)  # type: ignore[arg-type]
    if "/" not in plain and plain not in ("", ".", ".."):
        # Of a folder's descriptor, which events of `open` do not have: it was opened before,
        # by a path that is judged, and such a name leads nowhere else.
        return True
    name = os.path.abspath(plain)  # noqa: PTH100
    return name == cache or name.startswith(cache + "/") or name in ("/dev/null", "/dev/tty")


def install() -> None:
    """Write every complaint to the log, and first of all that this process is watched."""
    log = os.open(os.environ["WATCHED_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    cache, role = os.environ["WATCHED_CACHE"], " ".join(sys.orig_argv[1:])
    os.write(log, f"watched {role}\n".encode())

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if found := complaint(event, arguments, cache, role):
            os.write(log, f"complaint {found} in {role}\n".encode(errors="backslashreplace"))

    sys.addaudithook(hook)
