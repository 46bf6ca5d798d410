"""Run the tests of stores in one folder of the user's bucket, and erase the folder: ``make test-cloud``."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType

from tests.cloud.objects import Kept, Objects, erase_all, open_objects
from tests.cloud.place import OPTIONS, PREFIX, URL, key_of, options

OWN_FOLDER = re.compile(r"/growcache-test-[0-9a-f]{12}/$")
SUITE = ("tests/store/test_stores.py", "tests/store/test_odd_keys.py", "tests/cloud")
PERMISSIONS = "list, read, write and delete objects below it"


def main(arguments: Sequence[str] | None = None) -> int:
    given, pytest_arguments = _parser().parse_known_args(arguments)
    folder = given.remove or f"{given.url.rstrip('/')}/growcache-test-{secrets.token_hex(6)}/"
    if not OWN_FOLDER.search(folder):
        return _refuse(f"expected …/growcache-test-<12 digits>/ after --remove, found {folder}")
    try:
        objects = open_objects(folder, options())
        objects.put(key_of(folder) + "probe", b"growcache")
    except Exception as error:  # noqa: BLE001 - each client has its own
        return _refuse(
            f"cannot write to {folder}: {type(error).__name__}: {error}\n"
            f"{URL} names a bucket or a folder in which you may {PERMISSIONS}; {OPTIONS} has "
            "storage_options for it, such as {profile: lab, requester_pays: true}"
        )
    signal.signal(signal.SIGTERM, _interrupt)
    code = 130
    try:
        with contextlib.suppress(KeyboardInterrupt):
            code = 0 if given.remove else run_suite(folder, pytest_arguments)
    finally:
        is_removed = remove(objects, folder)
    return code or (0 if is_removed else 1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make test-cloud", description=__doc__)
    parser.add_argument("--url", default=os.environ.get(URL, ""), help=f"or the variable {URL}")
    parser.add_argument("--remove", metavar="URL", help="only erase a folder that was left")
    return parser


def run_suite(folder: str, pytest_arguments: Sequence[str]) -> int:
    print(
        f"Tests write below {folder}: a few hundred objects, less than 1 MB. All of it is removed at the end.\n"
        f"Were this process killed: {_removal(folder)}",
        flush=True,
    )
    command = [sys.executable, "-m", "pytest", *SUITE, "-k", "own", "--timeout=300", "-n", "4"]
    command += ["-m", "", *pytest_arguments]
    child = subprocess.Popen(command, env={**os.environ, PREFIX: folder})
    try:
        return child.wait()
    finally:  # Ctrl-C reached it as well, a signal to this process alone did not
        for number in (0, signal.SIGTERM, signal.SIGKILL):
            child.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(15)
                break


def remove(objects: Objects, folder: str) -> bool:
    print(f"Removing {folder} …", flush=True)
    left: Sequence[Kept] = ()
    reason: BaseException | None
    try:
        left, reason = erase_all(objects, key_of(folder))
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - each client has its own
        reason = error
    if not left and reason is None:
        print("Removed; nothing is left.")
        return True
    for one in left[:20]:
        print(f"left: {one.key} {one.version or ''}", file=sys.stderr)
    print(
        f"{len(left) or 'some'} objects or versions are left below {folder} "
        f"({type(reason).__name__}: {reason}). Remove them: {_removal(folder)}",
        file=sys.stderr,
    )
    return False


def _removal(folder: str) -> str:
    return f"{sys.executable} -m tests.cloud --remove {folder}"


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _refuse(text: str) -> int:
    print(text, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
