"""Shared by all benchmarks: the machine, `growcache run` as a child process, the table.

Callers interleave the repetitions (a, b, a, b, …) and compare them as ratios within a round,
because another program on the machine slows both equally.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml


@dataclass(frozen=True, slots=True)
class Run:
    """The cost of a finished child process.

    CPU time is user + system of the process and of all descendants it has waited for.
    """

    wall_seconds: float
    cpu_seconds: float
    output: str


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the arguments that every benchmark accepts."""
    made = argparse.ArgumentParser(
        description=(description or "").strip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "--quick", action="store_true", help="a small, rough run that checks whether it works"
    )
    made.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    made.add_argument("--rounds", type=int, help="interleaved repetitions")
    made.add_argument(
        "--directory", type=Path, help="where caches are made (a real disk; default: TMPDIR)"
    )
    return made


def machine() -> dict[str, Any]:
    """Return the properties of the machine that the figures depend on."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu_name(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "load_before": round(os.getloadavg()[0], 2),
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def write_config(
    path: Path,
    source: Mapping[str, Any],
    sampling: Mapping[str, Any],
    cache: Mapping[str, Any],
) -> None:
    """Write a configuration file for `growcache run`."""
    document = {"source": dict(source), "sampling": dict(sampling), "cache": dict(cache)}
    path.write_text(yaml.safe_dump(document), encoding="utf-8")


class Child:
    """A child process whose time and CPU are measured; its output goes to a file.

    A pipe that is not read would fill up and block the child.
    """

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self.log = log
        # Without cached bytecode every start would compile all modules again.
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        self.began = time.perf_counter()
        with log.open("wb") as sink:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env=environment
            )

    @classmethod
    def growcache(cls, *arguments: str, log: Path) -> Child:
        """Start growcache's command line with this Python."""
        return cls([sys.executable, "-m", "growcache", *arguments], log)

    @property
    def seconds(self) -> float:
        """Seconds since the child was started."""
        return time.perf_counter() - self.began

    def check(self, limit_seconds: float) -> None:
        """Exit the benchmark if the child failed or exceeded the limit."""
        if self.seconds > limit_seconds:
            self.process.kill()
            self._give_up(f"did not get this far within {limit_seconds:g} s")
        # waitid does not reap the child, because only wait4 reports its cost.
        ended = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None and ended.si_status:
            self._give_up(f"ended with {ended.si_status}")

    def interrupt(self) -> Run:
        """Stop the child as Ctrl-C does, and return its cost."""
        self.process.send_signal(signal.SIGINT)
        return self.wait(self.seconds + 30)

    def wait(self, limit_seconds: float = 600) -> Run:
        """Wait for the child to end, and return its cost.

        `wait4` counts the child and every descendant that it has waited for. Samplers are therefore
        counted because their supervisor reaps them.
        """
        pid = 0
        while not pid:
            self.check(limit_seconds)
            time.sleep(0.005)
            pid, status, usage = os.wait4(self.process.pid, os.WNOHANG)
        took = self.seconds
        self.process.returncode = os.waitstatus_to_exitcode(status)
        if self.process.returncode:
            self._give_up(f"ended with {self.process.returncode}")
        output = self.log.read_text(encoding="utf-8", errors="replace")
        return Run(took, usage.ru_utime + usage.ru_stime, output)

    def _give_up(self, what: str) -> NoReturn:
        output = self.log.read_text(encoding="utf-8", errors="replace")
        sys.exit(f"{self.process.args!r} {what}:\n{output[-2000:]}")


def median(values: Sequence[float]) -> float:
    """Return the median, rounded to four digits."""
    return float(f"{statistics.median(values):.4g}")


def report(title: str, rows: Sequence[Mapping[str, Any]], to: Path | None) -> None:
    """Print the machine's description and the figures as a table, and write them as JSON."""
    about = machine()
    print(f"\n{title}\n  on {', '.join(f'{k} {v}' for k, v in about.items())}")
    columns = list(dict.fromkeys(name for row in rows for name in row))
    texts = [[_cell(row.get(name)) for name in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *texts, strict=True)]
    for line in (columns, *texts):
        cells = (text.rjust(width) for text, width in zip(line, widths, strict=True))
        print("  " + "  ".join(cells))
    if to is not None:
        document = {"title": title, "machine": about, "rows": [dict(row) for row in rows]}
        to.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def verdict(value: float, goal: float, *, at_most: bool) -> str:
    """Return the goal and whether it was met: the last column of a table."""
    met = value <= goal if at_most else value >= goal
    return f"{'met' if met else 'MISSED'} ({'≤' if at_most else '≥'} {goal:g})"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
