"""The error streams of samplers, where the supervisor passes them on."""

from __future__ import annotations

import asyncio
import os
import time

from growcache.sampling.engines.child import StderrPipe


async def run_shell(script: str) -> tuple[list[bytes], float]:
    """Run a script; return what came of its error stream, and how long the pipe took to end."""
    passed_on: list[bytes] = []
    pipe = await StderrPipe.open(passed_on.append)
    process = await asyncio.create_subprocess_exec("sh", "-c", script, stderr=pipe.write_end)
    os.close(pipe.write_end)
    await process.wait()
    began = time.monotonic()
    await pipe.finish()
    return passed_on, time.monotonic() - began


def test_a_child_that_outlives_its_sampler_does_not_hold_the_end_up() -> None:
    passed_on, seconds = asyncio.run(run_shell("echo before >&2; sleep 20 & exit 3"))
    assert b"".join(passed_on) == b"before\n"
    assert seconds < 10


def test_lines_arrive_whole_and_the_last_one_is_ended() -> None:
    passed_on, _ = asyncio.run(
        run_shell("printf 'one\\ntw' >&2; sleep 0.2; printf 'o\\nend' >&2")
    )
    assert b"".join(passed_on) == b"one\ntwo\nend\n"
    assert all(lines.endswith(b"\n") for lines in passed_on)
