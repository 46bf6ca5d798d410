"""The demo's remote store: synthetic recordings of a machine's four vibration sensors.

A recording is an array of shape (steps, 4). The model learns from windows whether the machine
runs smoothly, knocks or runs up. The class is part of the object's name, and `label` adds it to
each sample.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from growcache.modes import make_private_directory
from growcache.schema import Array, Origin, Sample
from growcache.seeding import generator_at

CLASSES = ("smooth", "knock", "run-up")
CHANNELS = 4
WINDOW = 256
WINDOWS_PER_RECORDING = 64


def label(sample: Sample, origin: Origin) -> Sample:
    name = Path(origin.key).name.rpartition("-")[0]
    return {**sample, "y": np.array(CLASSES.index(name), np.int64)}


def write_recordings(folder: Path, number: int, seed: int = 0) -> None:
    make_private_directory(folder)
    for name in CLASSES:
        for i in range(number):
            np.save(folder / f"{name}-{i:03d}.npy", recording(name, i, seed))


def held_out_windows(number: int, seed: int) -> tuple[Array, Array]:
    """Return windows of unseen recordings: x (n, 256, 4), y (n,)."""
    cut = [
        recording(name, i, seed).reshape(-1, WINDOW, CHANNELS)[::8]
        for name in CLASSES
        for i in range(number)
    ]
    labels = np.repeat(np.arange(len(CLASSES)), sum(map(len, cut)) // len(CLASSES))
    return np.concatenate(cut), labels


def recording(name: str, number: int, seed: int) -> Array:
    rng = generator_at(seed, "demo", name, number)
    steps = WINDOW * WINDOWS_PER_RECORDING
    noise = rng.uniform(0.7, 1.1) * rng.normal(size=(steps, CHANNELS))
    hum = rng.uniform(0, 0.6) * np.sin(np.arange(steps) * rng.uniform(0.05, 0.2))
    signal = hum + SIGNALS[name](rng, steps)
    gains = rng.uniform(0.6, 1.0, CHANNELS)
    wave: Array = (noise + signal[:, None] * gains).astype(np.float32)
    return wave


def _smooth_signal(rng: np.random.Generator, steps: int) -> Array:
    """A steady tone, as loud as the peaks of the other two signals."""
    tone: Array = 0.9 * np.sin(np.arange(steps) * rng.uniform(0.3, 1.2))
    return tone


def _knock_signal(rng: np.random.Generator, steps: int) -> Array:
    """A damped ringing about once per window."""
    ring = np.arange(48)
    shape = np.exp(-ring / rng.uniform(6, 14)) * np.sin(ring * rng.uniform(0.3, 1.2))
    strikes = np.zeros(steps)
    period = int(rng.integers(110, 200))
    times = np.arange(int(rng.integers(period)), steps, period)
    strikes[times] = rng.uniform(2.5, 4.0)
    ringing: Array = np.convolve(strikes, shape)[:steps]
    return ringing


def _run_up_signal(rng: np.random.Generator, steps: int) -> Array:
    """A tone whose pitch climbs, falls and climbs again."""
    period = int(rng.integers(150, 260))
    climb = (np.arange(steps) + rng.integers(period)) % period / period
    pitch = rng.uniform(0.2, 0.4) + climb * rng.uniform(0.5, 0.9)
    tone: Array = 0.9 * np.sin(np.cumsum(pitch))
    return tone


SIGNALS = {"smooth": _smooth_signal, "knock": _knock_signal, "run-up": _run_up_signal}
