"""moto's S3 in a process of its own. The everyday suite uses it. It accepts any credentials."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
from collections.abc import Iterator

from tests.servers import S3Server, stop


@contextlib.contextmanager
def moto() -> Iterator[S3Server]:
    """A running server; it ends with the block, or with this process."""
    process = subprocess.Popen(
        [sys.executable, "-c", "from tests.servers.moto import main; main()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=_ROOT,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline() or 0)
        if not port:
            raise RuntimeError("moto did not start; is moto[s3,server] installed?")
        yield S3Server(
            "moto", f"http://127.0.0.1:{port}", "moto", "moto", checks_credentials=False
        )
    finally:
        stop(process)


def main() -> None:
    """Serve until standard input ends."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    sys.stdout.write(f"{server.get_host_and_port()[1]}\n")
    sys.stdout.flush()
    sys.stdin.read()
    server.stop()


_ROOT = __file__.rsplit("/tests/", 1)[0]
