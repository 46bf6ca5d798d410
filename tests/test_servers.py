"""The servers of the tests themselves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.chaos.processes import is_running
from tests.servers import wait_until

PROGRAM = """
import time
from tests.servers import spawn
print(spawn(["sleep", "60"]).pid, flush=True)
time.sleep(60)
"""


def test_a_server_does_not_outlive_a_killed_run() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, cwd=Path(__file__).parents[1]
    ) as run:
        assert run.stdout is not None
        server = int(run.stdout.readline())
        run.kill()
    wait_until(lambda: not is_running(server), "the end of the server")
