"""Watch whether a cluster answers, and whether this machine's node still belongs to it.

A request to a cluster without its head may never return, so requests have their own time limit.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

LOOK_SECONDS = 5.0
SILENT_SECONDS = 10.0  # without an answer, before the status reports it
MOST_SILENT_SECONDS = 120.0  # after which a new connection is attempted


async def reason_to_reconnect(
    is_member: Callable[[], bool], on_silence: Callable[[bool], None]
) -> str:
    """Wait until the connection is useless; return the reason.

    ``on_silence`` is called when the cluster becomes silent, and when it answers again.
    """
    silent_since: float | None = None
    question = asyncio.create_task(_answer(is_member))
    while True:
        await asyncio.wait({question}, timeout=SILENT_SECONDS)
        member = question.result() if question.done() else None
        if member is False:
            return "the Ray node of this machine died"
        if (member is None) != (silent_since is not None):
            silent_since = time.monotonic() if member is None else None
            on_silence(member is None)
        if silent_since is not None and time.monotonic() - silent_since > MOST_SILENT_SECONDS:
            return f"Ray's head has not answered for {MOST_SILENT_SECONDS:.0f} s"
        if question.done():
            await asyncio.sleep(LOOK_SECONDS)
            question = asyncio.create_task(_answer(is_member))


async def _answer(is_member: Callable[[], bool]) -> bool | None:
    """Return the answer, or None if the cluster refuses to answer."""
    try:
        return await asyncio.to_thread(is_member)
    except Exception:  # noqa: BLE001 - Ray raises many kinds without a head
        return None
