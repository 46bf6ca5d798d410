"""Requests to end a service, besides its own limits: a signal, or the end of its parent."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable


def listen_for_the_end(
    end: Callable[[], None], parent: int | None, *, handle_interrupt: bool
) -> None:
    """Let the running loop call ``end`` at SIGTERM, at SIGINT, and when the pipe ``parent`` closes."""
    loop = asyncio.get_running_loop()
    if threading.current_thread() is threading.main_thread():
        loop.add_signal_handler(signal.SIGTERM, end)
        if handle_interrupt:
            loop.add_signal_handler(signal.SIGINT, end)
    if parent is not None:
        loop.add_reader(parent, _parent_spoke, parent, end)


def _parent_spoke(parent: int, end: Callable[[], None]) -> None:
    if not os.read(parent, 4096):
        asyncio.get_running_loop().remove_reader(parent)
        end()
