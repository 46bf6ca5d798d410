"""What a stream can show: a picture that is redrawn, colours, or plain lines.

Colours follow the conventions that rich knows (``NO_COLOR``, ``FORCE_COLOR``, ``TERM``).
Whether something may be *redrawn* is another question: a log file whose colours were forced
is still no place for cursor movements.
"""

from __future__ import annotations

import os
import sys
from typing import IO

NO_COLOR = "--no-color"
DUMB = ("dumb", "unknown")


def redraws(stream: IO[str]) -> bool:
    """Return whether a picture can be redrawn in place on the stream."""
    return stream.isatty() and os.environ.get("TERM", "").lower() not in DUMB


def is_asked() -> bool:
    """Return whether somebody sits there who can answer a question."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def without_no_color(arguments: list[str]) -> list[str]:
    """Return the arguments less ``--no-color``, which is obeyed at once.

    It is taken anywhere, before the command as well as after it, and is passed on to children
    by the environment variable that all programs know.
    """
    if NO_COLOR not in arguments:
        return arguments
    os.environ["NO_COLOR"] = "1"
    os.environ.pop("FORCE_COLOR", None)
    return [argument for argument in arguments if argument != NO_COLOR]
