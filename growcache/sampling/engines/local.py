"""Samplers as child processes of this machine, connected by pipes.

They start as ``python -m growcache sampler``, never by fork or multiprocessing, so that the user's script is not
imported again and needs no ``__main__`` guard. Each has its own session, so that a terminal's Ctrl-C reaches only
the supervisor.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

from growcache.sampling.messages import Message, pack, unpack
from growcache.usercode import child_environment

LINE_BYTES = 1 << 24
STDERR_BYTES = 1 << 16
ENVIRONMENT = {
    # One thread for the client's own runtime: more of them only fight with the event loop,
    # and cost a third more CPU per byte.
    "TOKIO_WORKER_THREADS": "1",
    # Samplers are the parallelism; idle BLAS threads spin for 50 ms at every start.
    "OPENBLAS_NUM_THREADS": "1",
    # Objects come and go all the time. glibc would give their memory back to the kernel and
    # have it cleared anew for the next ones, which costs as much as reading the socket.
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),  # the highest it takes
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
}
STOP_SECONDS = (3.0, 3.0, 10.0)  # after closing the pipe, after SIGTERM, after SIGKILL


class SamplerProcess:
    """One child: messages in, messages out, and the ladder by which it is stopped."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        on_message: Callable[[Message], None],
        on_stderr: Callable[[bytes], None] | None = None,
    ) -> None:
        self._process = process
        self._reading = asyncio.gather(self._read(on_message), self._read_stderr(on_stderr))

    @classmethod
    async def start(
        cls,
        on_message: Callable[[Message], None],
        on_stderr: Callable[[bytes], None] | None = None,
    ) -> SamplerProcess:
        """Start a child; ``on_message`` is told each of its messages."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "growcache",
            "sampler",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=None if on_stderr is None else asyncio.subprocess.PIPE,
            limit=LINE_BYTES,
            start_new_session=True,
            env={**ENVIRONMENT, **child_environment()},
        )
        return cls(process, on_message, on_stderr)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def send(self, message: Message) -> None:
        """Send a message; to a dead child it is lost, and `ended` tells of the death."""
        assert self._process.stdin is not None
        if not self._process.stdin.is_closing():
            self._process.stdin.write(pack(message))

    async def ended(self) -> int:
        """Return the exit code once the child is gone and all it said was heard."""
        await self._reading
        return await self._process.wait()

    def kill(self) -> None:
        """End the child at once."""
        if self._process.returncode is None:
            self._process.kill()

    async def stop(self) -> None:
        """Close the pipe, then ask, then kill; return when the child is gone."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        for seconds, escalate in zip(
            STOP_SECONDS, (self._process.terminate, self._process.kill, None), strict=True
        ):
            try:
                await asyncio.wait_for(asyncio.shield(self._process.wait()), seconds)
            except TimeoutError:
                if escalate is not None:
                    escalate()
            else:
                break
        await self._reading

    async def _read(self, on_message: Callable[[Message], None]) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            if line.endswith(b"\n"):  # a child killed while it spoke leaves half a line
                on_message(unpack(line))

    async def _read_stderr(self, on_stderr: Callable[[bytes], None] | None) -> None:
        """Pass on whole lines that the child writes to its error stream."""
        if on_stderr is None or self._process.stderr is None:
            return
        rest = b""
        while chunk := await self._process.stderr.read(STDERR_BYTES):
            lines, end, rest = (rest + chunk).rpartition(b"\n")
            if len(rest) > STDERR_BYTES:  # a line without end, such as a progress bar
                lines, end, rest = lines + end + rest, b"\n", b""
            if end:
                on_stderr(lines + end)
        if rest:
            on_stderr(rest + b"\n")
