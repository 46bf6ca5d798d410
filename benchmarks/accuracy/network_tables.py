"""G5's table: what each loader delivered before its link was cut, meanwhile and afterwards."""

from __future__ import annotations

from benchmarks.accuracy.network import BACK, CUT, END, Second

PHASES = (
    ("link of a tenth", 20.0, CUT),
    ("link cut", CUT, BACK),
    ("link is back", BACK, END),
)
HEAD = ("loader", *(f"{name}: {what}" for name, *_ in PHASES for what in ("samples/s", "wait")))


def table(by_arm: dict[str, list[Second]]) -> str:
    """Return a row per loader; the first 20 s, in which loaders start, do not count."""
    rows = [_cells(arm, seconds) for arm, seconds in by_arm.items()]
    lines = (HEAD, ("---",) + ("--:",) * (len(HEAD) - 1), *rows)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _cells(arm: str, seconds: list[Second]) -> tuple[str, ...]:
    found = [arm]
    for _, begin, end in PHASES:
        inside = [one for one in seconds if begin <= one.second < end]
        found.append(f"{sum(one.delivered for one in inside) / (end - begin):,.0f}")
        found.append(f"{100 * sum(one.waited for one in inside) / (end - begin):.0f} %")
    return tuple(found)
