"""The one retry policy: jittered exponential back-off until nothing moved for so long."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from growcache.errors import StoreRefusedError, TransientStoreError

if TYPE_CHECKING:
    from tenacity import RetryCallState

T = TypeVar("T")

FIRST_WAIT_SECONDS = 0.2
LONGEST_WAIT_SECONDS = 8.0
LONGEST_ENDLESS_SECONDS = 5.0  # so that whoever waits for hours goes on soon


def stalled_seconds(timeout_seconds: float) -> float:
    """Return after how long without a byte a connection is given up.

    Early enough that another one has its chance before the whole read is.
    """
    return max(0.1, timeout_seconds / 4)


class Patience:
    """Tries again what failed for a transient reason.

    The clock starts with the first failure, so that one long attempt that broke off (a
    large object on a slow link) is not by itself a reason to give up.

    Args:
        timeout_seconds: how long; of no meaning with ``endless``.
        on_retry: told of every failure that is tried again.
        endless: tells what is tried again for ever. Without it what is refused is not tried
            again at all, for nothing will come of it soon.
    """

    def __init__(
        self,
        timeout_seconds: float,
        on_retry: Callable[[BaseException], None] | None = None,
        endless: Callable[[TransientStoreError], bool] | None = None,
    ) -> None:
        self.timeout_seconds = timeout_seconds
        self._on_retry = on_retry
        self._endless = endless

    def call(self, attempt: Callable[[], T]) -> T:
        """Return what ``attempt`` returns, in the end.

        Raises:
            TransientStoreError: still failing after ``timeout_seconds``.
        """
        try:
            return attempt()
        except TransientStoreError as error:
            if not self._is_tried_again(error):
                raise
            from tenacity import Retrying

            policy = self._policy(time.monotonic())
            first = _Once(error)

            def again() -> T:
                first.raise_it()
                return attempt()

            return Retrying(**policy)(again)

    async def again(self, attempt: Callable[[], Awaitable[T]], error: TransientStoreError) -> T:
        """Return what ``attempt`` returns, in the end, after a first try ended in ``error``.

        The first try is the caller's own, because going through tenacity costs as much as a
        small read.

        Raises:
            TransientStoreError: still failing after ``timeout_seconds``.
        """
        from tenacity import AsyncRetrying

        policy = self._policy(time.monotonic())
        first = _Once(error)

        async def again() -> T:
            first.raise_it()
            return await attempt()

        return await AsyncRetrying(**policy)(again)

    def _is_tried_again(self, error: BaseException) -> bool:
        if not isinstance(error, TransientStoreError):
            return False
        if self._endless is not None:
            return self._endless(error)
        return not isinstance(error, StoreRefusedError)

    def _policy(self, since: float) -> dict[str, Any]:
        from tenacity import (
            retry_if_exception,
            stop_before_delay,
            stop_never,
            wait_random_exponential,
        )

        endless = self._endless is not None
        longest = LONGEST_ENDLESS_SECONDS if endless else LONGEST_WAIT_SECONDS
        return {
            "retry": retry_if_exception(self._is_tried_again),
            "wait": wait_random_exponential(FIRST_WAIT_SECONDS, longest),
            "stop": stop_never if endless else stop_before_delay(self.timeout_seconds),
            "before_sleep": self._tell,
            "retry_error_callback": partial(self._give_up, since),
        }

    def tell(self, error: BaseException) -> None:
        """Tell of a failure that is tried again: else a sampler that waits seems to be stuck."""
        if self._on_retry is not None:
            self._on_retry(error)

    def _tell(self, state: RetryCallState) -> None:
        if state.outcome is not None and (error := state.outcome.exception()) is not None:
            self.tell(error)

    def _give_up(self, since: float, state: RetryCallState) -> Any:
        error = state.outcome.exception() if state.outcome is not None else None
        given_up = TransientStoreError(
            f"{error}; given up after {state.attempt_number} tries, "
            f"{self.timeout_seconds:g} s without progress"
        )
        given_up.since = since
        raise given_up from error


class _Once:
    """Replays the failure that came before tenacity, so that it waits first."""

    def __init__(self, error: TransientStoreError) -> None:
        self._error: TransientStoreError | None = error

    def raise_it(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error
