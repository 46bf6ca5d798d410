"""A picture that is redrawn in place, on a terminal that people type at and resize.

Rich moves the cursor up by as many lines as it drew. Two things upset that: Ctrl-C, which
the terminal shows as ^C where the cursor stands, and a terminal that became narrower and
broke every line of the last picture in two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.segment import Segment

Lines = list[list[Segment]]


@dataclass(frozen=True)
class _Frame:
    """Lines that are drawn already."""

    lines: Lines

    def __rich_console__(self, _: Console, __: ConsoleOptions) -> RenderResult:
        for line in self.lines:
            yield from line
            yield Segment.line()


class Redrawn:
    """What is drawn takes the place of what was drawn before, until the block ends.

    Args:
        console: where.
        transient: leave nothing behind.
    """

    def __init__(self, console: Console, *, transient: bool = False) -> None:
        self._console = console
        # No refresh thread: the picture changes when a status comes, and only then.
        self._live = Live(console=console, auto_refresh=False, transient=transient)
        self._lines: Lines = []
        self._width = console.width

    @property
    def height(self) -> int:
        """How many lines a picture may have: all but that of the cursor."""
        return max(1, self._console.height - 1)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.update(_Frame(self._lines))  # without the line for the cursor
        self._live.stop()

    def draw(self, picture: RenderableType) -> None:
        """Draw it in the place of the last one."""
        if self._console.width < self._width:
            self._gather(self._console.width)
        self._width = self._console.width
        self._lines = self._console.render_lines(picture, pad=False)
        # The cursor waits on a line of its own: ^C goes there, and goes away with it.
        self._live.update(_Frame([*self._lines, []]), refresh=True)

    def _gather(self, width: int) -> None:
        """Erase the last picture, and leave the cursor where Rich believes it to be."""
        lengths = [Segment.get_line_length(line) for line in self._lines]
        broken = sum(max(1, -(-length // width)) for length in lengths)
        if broken:
            self._console.file.write(f"\r\x1b[{broken}A\x1b[J" + "\n" * len(lengths))
