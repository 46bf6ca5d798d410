"""What pictures are made of: bars, curves, lines that fit where they are put."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

from growcache.service.history import History
from growcache.service.words import in_time, shortened

FREE = ("bright_black", "░")
# What takes the place of characters that a terminal without Unicode does not have.
ASCII = str.maketrans("█▓▒▌░·", "#%+=.,")
SPARKS = "▁▂▃▄▅▆▇█"
ASCII_SPARKS = "._-=+*#@"
CURVE_WIDTH = 60
SHORTEST_BAR = 4


@dataclass(frozen=True)
class Bar:
    """A bar of coloured parts over a total, as wide as there is room."""

    parts: Sequence[tuple[float, str, str]]  # amount, colour, character
    total: float
    width: int | None = None

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        width = min(self.width or options.max_width, options.max_width)
        scale = width / max(self.total, sum(part[0] for part in self.parts), 1e-9)
        ends = [0.0]
        for amount, *_rest in self.parts:
            ends.append(ends[-1] + max(0.0, amount))
        cells = [round(end * scale) for end in ends]
        cells.append(width)
        looks = [*((colour, character) for _, colour, character in self.parts), FREE]
        for (start, stop), (colour, character) in zip(pairwise(cells), looks, strict=True):
            shown = character.translate(ASCII) if options.ascii_only else character
            yield Segment(shown * (stop - start), Style(color=colour))
        yield Segment.line()

    def __rich_measure__(self, _: Console, options: ConsoleOptions) -> Measurement:
        width = min(self.width or options.max_width, options.max_width)
        return Measurement(min(SHORTEST_BAR, width), width)


@dataclass(frozen=True)
class Curve:
    """How the number of cached samples went, and over how long."""

    history: History

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        words = f"  last {in_time(self.history.seconds())}"
        values = self.history.samples(min(options.max_width - len(words), CURVE_WIDTH))
        if not values:
            yield Text("watched from now on", style="dim")
            return
        top = max(values)
        sparks = ASCII_SPARKS if options.ascii_only else SPARKS
        line = (sparks[value * len(sparks) // (top + 1)] for value in values)
        yield Segment("".join(line), Style(color="green"))
        yield Segment(words)
        yield Segment.line()


@dataclass(frozen=True)
class Steady:
    """A text of always two lines, for it may need them: nothing below it jumps.

    What is too long even for two is shortened where it names an object.
    """

    text: Text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = shorter(self.text, console, options.max_width, 2)
        yield from lines
        if len(lines) < 2:
            yield Text("")


def shorter(text: Text, console: Console, width: int, most: int) -> list[Text]:
    """Return a text as so many lines at most; a text that is shortened has one style."""
    lines = list(text.wrap(console, width))
    room = most * width
    while len(lines) > most and room > most:
        room -= 1  # words leave ends of lines empty, so how much has to go is to be tried
        plain = shortened(text.plain, room)
        spans = [span for span in text.spans if span.end <= room // 2]
        lines = list(Text(plain, text.style, spans=spans).wrap(console, width))
    return lines


@dataclass(frozen=True)
class OneLine:
    """A text on one line, shortened where it names an object."""

    text: str
    style: str = ""

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        short = shortened(self.text, options.max_width)
        yield Text(short, self.style, no_wrap=True, overflow="ellipsis")


@dataclass(frozen=True)
class Pieces:
    """Texts with dots between them; lines end between two of them, if they have to end."""

    pieces: Sequence[Text]
    before: Bar | None = None  # left of the first line, where both have room on it

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        bar = self.before
        pieces = [_plain(piece) for piece in self.pieces] if options.ascii_only else self.pieces
        dot = Text(" · ".translate(ASCII) if options.ascii_only else " · ")
        whole = dot.join(pieces)
        if bar is not None and (bar.width or 0) + 1 + whole.cell_len <= options.max_width:
            yield from list(console.render(bar, options))[:-1]  # less its end of line
            yield Segment(" ")
        yield from _in_lines(pieces, dot, options.max_width)


def _in_lines(pieces: Sequence[Text], dot: Text, width: int) -> list[Text]:
    lines: list[Text] = []
    for piece in pieces:
        if lines and lines[-1].cell_len + dot.cell_len + piece.cell_len <= width:
            lines[-1] = dot.join([lines[-1], piece])
        else:
            lines.append(piece)
    return lines


def _plain(text: Text) -> Text:
    return Text(text.plain.translate(ASCII), text.style, spans=text.spans)
