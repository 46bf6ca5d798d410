"""When the next snapshot is taken: as late as is safe, for what arrives until then is in it.

The consumer tells nobody of each batch, for that would cost each batch; where it stands is
looked at now and then.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

# The preparation may take so many times as long as the longest lately, and so much longer.
MARGIN = 4.0
SLACK_SECONDS = 0.05
# Of long passes more, for a disk that others write to may stand still for half a second.
SLACK_SHARE, MOST_SLACK_SECONDS = 0.02, 1.0
LOOK_SECONDS = 0.02
KEPT = 6  # preparations, and paces, that are remembered
FEW_LOOKS, RECENT_LOOKS = 5, 10  # that tell the present pace
HEAD_START_SECONDS = 0.01  # of the consumer, at most


def head_start(step_seconds: float) -> float:
    """Return how long a thread that the consumer woke lets it go first.

    Half a step: then it is neither still about to take its batch nor about to ask for the
    next one.

    >>> head_start(0.005), head_start(3.0)
    (0.0025, 0.01)
    """
    return min(HEAD_START_SECONDS, step_seconds / 2)


def is_due(
    left_rows: int, rows_per_second: float, prepare_seconds: float | None, pass_rows: int
) -> bool:
    """Return whether it is time to prepare the next pass.

    Args:
        left_rows: of this pass, that the consumer has not had yet.
        rows_per_second: that it takes, at the fastest.
        prepare_seconds: that a preparation takes; None where that is not known.
        pass_rows: all of this pass.
    """
    if prepare_seconds is None:
        return True
    slack = min(SLACK_SHARE * pass_rows, MOST_SLACK_SECONDS * rows_per_second)
    slack = max(slack, SLACK_SECONDS * rows_per_second)
    return left_rows <= MARGIN * prepare_seconds * rows_per_second + slack


@dataclass(slots=True)
class Timing:
    """What earlier passes taught; used by one thread at a time.

    Attributes:
        prepared: seconds that the latest preparations took, without waits for samples.
        paces: rows per second of the consumer, at its fastest in the latest passes.
        passed: the same, from the beginning of one wait to the next, for the two latest ones:
            the slower one counts, for a pass may have been left early.
    """

    prepared: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    paces: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    passed: deque[float] = field(default_factory=lambda: deque([0.0, 0.0], maxlen=2))
    _began: tuple[float, int] = (math.inf, 0)

    @property
    def prepare_seconds(self) -> float | None:
        """What a preparation may take; None before the first."""
        return max(self.prepared, default=None)

    def learn(self, seconds: float, rows: int, prepared: float) -> None:
        """Note how a preparation went.

        Args:
            seconds: from its beginning to its end, in which
            rows: were consumed; and
            prepared: what of the seconds was no wait for samples.
        """
        self.prepared.append(prepared)
        if rows > 0 and seconds > 0:
            self.paces.append(rows / seconds)

    def wait(
        self,
        pass_rows: int,
        left: Callable[[], int],
        pause: Callable[[float], bool],
        clock: Callable[[], float],
    ) -> None:
        """Return when the next pass is to be prepared.

        Args:
            pass_rows: of this pass.
            left: rows of this pass that the consumer has not had yet; none of them where it
                wants no more.
            pause: waits so many seconds; True ends all waiting.
            clock: seconds.
        """
        now, rows, seen = clock(), left(), 0.0
        self._note_pass(now, pass_rows, rows)
        known = max([min(self.passed), *self.paces])
        looks = deque([(now, rows)], maxlen=RECENT_LOOKS)
        while rows and not is_due(rows, max(known, seen), self.prepare_seconds, pass_rows):
            if pause(LOOK_SECONDS):
                return
            now, rows = clock(), left()
            began, before = looks[0]
            # A batch that happens to come within a single look tells little; and that there is
            # nothing left may also be said of an epoch that is left early.
            if rows and (len(looks) >= FEW_LOOKS or not known):
                seen = max(seen, (before - rows) / max(1e-9, now - began))
            looks.append((now, rows))
        if seen:
            self.paces.append(seen)

    def _note_pass(self, now: float, pass_rows: int, left: int) -> None:
        """Note what was consumed since the wait before: a short pass is over between two looks."""
        began, before = self._began
        consumed = before + pass_rows - left
        self.passed.append(consumed / (now - began) if now > began else 0.0)
        self._began = now, left
