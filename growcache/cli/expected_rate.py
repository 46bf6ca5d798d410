"""The rate that the settings can reach at a measured latency."""

from __future__ import annotations

from dataclasses import dataclass

from growcache.config import SamplingConfig
from growcache.humanize import in_bytes, in_count

LOCAL_SECONDS = 0.002  # if a read takes less, the store does not limit the rate


@dataclass(frozen=True, slots=True)
class ReadTiming:
    seconds: float  # of one read of a visit
    samples: float  # per visit
    sample_bytes: int


def reachable_rate(timing: ReadTiming, workers: int, concurrency: int) -> float:
    """Return the samples per second if the store answers parallel reads as fast as one.

    >>> reachable_rate(ReadTiming(0.048, 1, 65_536), 2, 16)
    666.6666666666666
    """
    return workers * concurrency * timing.samples / timing.seconds


def rate_sentence(timing: ReadTiming | None, settings: SamplingConfig | None = None) -> str:
    """Return a sentence about the reachable rate, or "" without a timing.

    >>> rate_sentence(ReadTiming(0.048, 1, 65_536))
    'A read took 48 ms: 2 workers with 16 reads in flight each reach about 670 samples/s (44 MB/s), as far as network and CPU allow.'
    """
    if timing is None or timing.samples <= 0:
        return ""
    if timing.seconds < LOCAL_SECONDS:
        return "A read took less than 2 ms, so the CPU sets the rate: more workers help, more reads in flight do not."
    chosen = settings or SamplingConfig()
    rate = _two_digits(reachable_rate(timing, chosen.workers, chosen.concurrency))
    each = f"{chosen.workers} workers with {chosen.concurrency} reads in flight each"
    size = in_bytes(_two_digits(rate * timing.sample_bytes))
    size = size.replace(".00", "").replace(".0 ", " ")
    return (
        f"A read took {1000 * timing.seconds:.0f} ms: {each} reach about {in_count(rate)} samples/s "
        f"({size}/s), as far as network and CPU allow."
    )


def _two_digits(value: float) -> float:
    return float(f"{value:.2g}")
