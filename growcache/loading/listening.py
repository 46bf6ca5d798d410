"""The thread in which a child process hears its parent: without it, neither would go on."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable

from growcache.loading.wire import Wire


def listen(wire: Wire, hear: Callable[[], None]) -> None:
    """Call in a thread what waits for what the parent says, until it returns.

    The end of the connection ends this process at once, and so does any error: whoever waits
    here for orders would wait for ever, and the parent for this process. It is told why.

    Args:
        wire: to the parent.
        hear: raises EOFError where the parent is gone.
    """
    threading.Thread(
        target=_run, args=(wire, hear), name="growcache-listen", daemon=True
    ).start()


def _run(wire: Wire, hear: Callable[[], None]) -> None:
    try:
        hear()
    except EOFError:
        os._exit(0)
    except BaseException as error:  # noqa: BLE001 - this process is of no more use
        wire.tell(error)
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
