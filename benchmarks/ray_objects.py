"""The objects of the benchmark `ray_engine`, and what its parts share."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.servers import KEY, SECRET, Server, make_bucket, running_server

BUCKET = "bench"
WINDOW = (256, 64)  # float32: 64 KiB
OBJECT_WINDOWS = 64  # 4 MiB
WINDOW_BYTES = 4 * WINDOW[0] * WINDOW[1]
HEADER_BYTES = 128  # of the .npy files


def key(number: int) -> str:
    return f"{number:05d}.npy"


@contextmanager
def served_objects(count: int) -> Iterator[Server]:
    """Serve arrays of windows by nginx; the first number of a window tells which one it is."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal((OBJECT_WINDOWS, *WINDOW), np.float32)
    with running_server("nginx") as server:
        assert server.folder is not None
        make_bucket(server, BUCKET)
        for number in range(count):
            values[:, 0, 0] = np.arange(OBJECT_WINDOWS) + number * OBJECT_WINDOWS
            np.save(server.folder / BUCKET / key(number), values)
        # Samplers elsewhere take credentials from the environment.
        os.environ |= {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
        yield server


def source_of(server: Server) -> dict[str, Any]:
    return {
        "url": f"s3://{BUCKET}/*.npy",
        "storage_options": {"endpoint_url": server.endpoint},
        "options": {"axis": 0},
    }


def spectrum(sample: dict[str, Any]) -> dict[str, Any]:
    """A transform that costs more than the rest: power by frequency, of half-overlapping frames."""
    frames = np.lib.stride_tricks.sliding_window_view(sample["x"], 64, axis=0)[::16]
    return {"x": np.abs(np.fft.rfft(frames, axis=-1)).astype(np.float32)}


def process_kind(command: Sequence[str]) -> str | None:
    """Name what a command line is a part of; the server is no part of any figure.

    >>> process_kind(["python", "-m", "growcache", "ray-writer"]), process_kind(["ray::IDLE"])
    ('writer', 'workers')
    """
    line = " ".join(command)
    kinds = {
        "nginx": None,
        "growcache ray-writer": "writer",
        "growcache run": "supervisor",
        "growcache sampler": "workers",
        "ray_data_reader": "reader",
        "ray::DashboardAgent": "Ray",
        "ray::RuntimeEnvAgent": "Ray",
        "ray::": "workers",
        "default_worker": "workers",
    }
    return next((kind for part, kind in kinds.items() if part in line), "Ray")


def sent_bytes() -> int:
    """Return what nginx has sent so far, by the kernel's count of its writes."""
    children = psutil.Process().children(recursive=True)
    servers = (child for child in children if child.name() == "nginx")
    return sum(server.io_counters().write_chars for server in servers)


def on_ray(address: str, samplers: int = 2, **more: Any) -> dict[str, Any]:
    """Return the settings of `sampling` for samplers on a cluster."""
    return {
        "engine": "ray",
        "workers": 0,
        "ray": {"address": address, "workers": samplers, **more},
    }


def shard_times(cache: Path) -> list[float]:
    """Return when each file of a shard came to the cache, in order."""
    found = os.scandir(cache / "shards")
    return sorted(entry.stat().st_ctime for entry in found)
