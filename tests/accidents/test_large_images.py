"""Large images do not exhaust a sampler's memory: few are decoded at once, and none in vain."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.accidents.commands import growcache as command
from tests.accidents.commands import running, status, write_config

Image = pytest.importorskip("PIL.Image")

MEGABYTE = 1 << 20
SMALL = 40
HALVE = """
def shrink(sample):
    return {"image": sample["image"][:64, :64].copy()}
"""


def write_images(folder: Path, side: int, large: int) -> None:
    """Write `large` images that are huge when decoded, and some small ones."""
    folder.mkdir()
    Image.new("RGB", (side, side), (7, 8, 9)).save(folder / "large00.png")
    for number in range(1, large):
        shutil.copy(folder / "large00.png", folder / f"large{number:02d}.png")
    for number in range(SMALL):
        size = (100 + number, 64)
        Image.new("RGB", size, (number, 3, 5)).save(folder / f"small{number:02d}.png")


def descendants(pid: int) -> Iterator[int]:
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            yield from descendants(int(child))


class Peak:
    """The peak memory of any one process of a service, in bytes."""

    def __init__(self) -> None:
        self.nbytes = 0

    def look(self, pid: int) -> None:
        try:
            for one in descendants(pid):
                text = Path(f"/proc/{one}/status").read_text()
                for line in text.splitlines():
                    if line.startswith("VmHWM:"):
                        self.nbytes = max(self.nbytes, 1024 * int(line.split()[1]))
        except OSError:  # a process has just ended
            pass


@contextmanager
def watched(pid: int) -> Iterator[Peak]:
    peak, ended = Peak(), threading.Event()

    def watch() -> None:
        while not ended.wait(0.02):
            peak.look(pid)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()


def filled(config: Path, **options: Any) -> tuple[dict[str, Any], int]:
    """Run a service until its cache is full; return its status and its peak memory."""
    with running(config, "--until-full", **options) as service:
        with watched(service.process.pid) as peak:
            deadline = time.monotonic() + 240
            while service.alive:
                assert time.monotonic() < deadline, service.errors
                time.sleep(0.02)
        assert service.process.returncode == 0, service.errors
    return status(config.with_suffix("")), peak.nbytes


@pytest.mark.slow
def test_a_sample_that_no_group_can_hold_is_not_decoded(tmp_path: Path) -> None:
    write_images(tmp_path / "images", 9_400, 8)
    config = write_config(
        tmp_path / "cache.yaml",
        {
            "url": f"{tmp_path}/images/small*.png",
            "format": "image",
            "options": {"decode": True, "label": "none"},
        },
        sampling={"max_skipped": 1.0},
        cache={"max_bytes": "100MB"},
    )
    filled(config)  # the small images determine the schema and the group size
    large = tmp_path / "images" / "large00.png"
    for number in range(8):
        shutil.copy(large, tmp_path / "images" / f"small_large{number}.png")
    with running(config, "--until-full", "--refresh") as service:
        with watched(service.process.pid) as peak:
            service.process.wait(300)
        assert service.process.returncode == 0, service.errors
    found = status(tmp_path / "cache")
    assert (found["samples"], found["holes"]) == (SMALL, 8)
    assert peak.nbytes < 300 * MEGABYTE
    reasons = json.dumps(found)
    assert "a sample of 265,080,000 bytes" in reasons


@pytest.mark.slow
def test_images_that_a_transform_makes_small_are_decoded_few_at_a_time(tmp_path: Path) -> None:
    write_images(tmp_path / "images", 6_000, 10)
    (tmp_path / "shrinking.py").write_text(HALVE)
    config = write_config(
        tmp_path / "cache.yaml",
        {
            "url": f"{tmp_path}/images/large*.png",
            "format": "image",
            "options": {"decode": True, "label": "none"},
        },
        sampling={"transform": "shrinking:shrink", "timeout_seconds": 60},
    )
    found, peak = filled(config, cwd=tmp_path)
    assert (found["samples"], found["holes"]) == (10, 0)
    assert peak < 900 * MEGABYTE
    assert command("check", tmp_path / "cache").returncode == 0
