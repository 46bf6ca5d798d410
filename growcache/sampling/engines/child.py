"""A child process that communicates in lines: ``python -m growcache COMMAND``.

It never starts by fork or multiprocessing, so that the user's script needs no ``__main__``
guard. It has its own session, so that a terminal's Ctrl-C reaches only the supervisor.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType

from growcache.sampling.engines import SamplerEnd
from growcache.sampling.messages import Message, pack, unpack
from growcache.usercode import child_environment

LINE_BYTES = 1 << 24
STDERR_BYTES = 1 << 16
ENVIRONMENT = {
    # One thread for the client's own runtime. More threads only compete with the event loop,
    # and cost a third more CPU time per byte.
    "TOKIO_WORKER_THREADS": "1",
    # Samplers themselves are parallel, and idle BLAS threads would spin for 50 ms at every
    # start.
    "OPENBLAS_NUM_THREADS": "1",
    # Objects are loaded and freed continuously. glibc would return their memory to the kernel
    # and have it cleared again for the next ones, which costs as much as reading the socket.
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),  # the largest accepted value
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
}
STDERR_SECONDS = 0.5  # for reading a child's error stream after its end
STOP_SECONDS = (3.0, 3.0, 10.0)  # after closing the pipe, after SIGTERM, after SIGKILL


class EngineProcess:
    def __init__(
        self,
        process: asyncio.subprocess.Process,
        on_message: Callable[[Message], None],
        stderr: StderrPipe | None,
    ) -> None:
        self._process = process
        self._stderr = stderr
        self._reading = asyncio.ensure_future(self._read(on_message))

    @classmethod
    async def start(
        cls,
        command: str,
        on_message: Callable[[Message], None],
        on_stderr: Callable[[bytes], None] | None = None,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> EngineProcess:
        """Start a child. ``variables`` are added to this process's environment."""
        stderr = None if on_stderr is None else await StderrPipe.open(on_stderr)
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "growcache",
                command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=None if stderr is None else stderr.write_end,
                limit=LINE_BYTES,
                start_new_session=True,
                env={**ENVIRONMENT, **child_environment(), **variables},
            )
        except BaseException:
            if stderr is not None:
                stderr.close()
            raise
        finally:
            if stderr is not None:
                os.close(stderr.write_end)
        return cls(process, on_message, stderr)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def node(self) -> None:
        """None, because it runs on this machine."""

    def send(self, message: Message) -> None:
        """Send a message. If the child is dead it is lost, and `ended` reports the death."""
        assert self._process.stdin is not None
        if not self._process.stdin.is_closing():
            self._process.stdin.write(pack(message))

    async def ended(self) -> SamplerEnd:
        """Wait until the child is gone and its output is read; return its exit code."""
        await self._reading
        code = await self._process.wait()
        await self._finish_stderr()
        return SamplerEnd(code)

    def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()

    async def stop(self) -> None:
        """Close the pipe, then terminate, then kill; return after the child is gone."""
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
        await self._finish_stderr()

    async def _finish_stderr(self) -> None:
        if self._stderr is not None:
            await self._stderr.finish()

    async def _read(self, on_message: Callable[[Message], None]) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            if line.endswith(b"\n"):  # a killed child may leave half a line
                on_message(unpack(line))


class StderrPipe:
    """A child's error stream, passed on in whole lines.

    It is not a pipe of asyncio's process, because that counts as alive until the pipe is
    closed, and a child of the user's code may outlive the sampler.
    """

    def __init__(
        self, write_end: int, reader: asyncio.StreamReader, transport: asyncio.ReadTransport
    ) -> None:
        self.write_end = write_end
        self._reader = reader
        self._transport = transport
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, on_stderr: Callable[[bytes], None]) -> StderrPipe:
        """Return a new pipe. The caller closes ``write_end`` after a child has it."""
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
        read_end, write_end = os.pipe()
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_end, "rb", 0)
        )
        pipe = cls(write_end, reader, transport)
        pipe._task = asyncio.ensure_future(pipe._pass_on(on_stderr))
        return pipe

    async def finish(self) -> None:
        """Pass on the rest, and close the pipe, although a grandchild may still hold it."""
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=STDERR_SECONDS)
        self.close()

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._transport.close()

    async def _pass_on(self, on_stderr: Callable[[bytes], None]) -> None:
        rest = b""
        while chunk := await self._reader.read(STDERR_BYTES):
            lines, end, rest = (rest + chunk).rpartition(b"\n")
            if len(rest) > STDERR_BYTES:  # an endless line, such as a progress bar
                lines, end, rest = lines + end + rest, b"\n", b""
            if end:
                on_stderr(lines + end)
        if rest:
            on_stderr(rest + b"\n")
