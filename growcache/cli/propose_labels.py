"""Propose labels from a table found with the objects, and a split by the subjects in keys."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from growcache.cli.propose_options import names_text
from growcache.humanize import in_count

MIN_MATCHED_SHARE = 0.5  # of the objects, needed to propose a table
MAX_LABEL_COLUMNS = 8
MAX_CLASSES = 1000
MIN_GROUPS = 5  # fewer cannot be split
FRACTIONS = {"train": 0.8, "val": 0.2}
_MISSING = ("", "n/a", "na", "nan", "null", "none")
_SUBJECT = re.compile(r"(?<![A-Za-z])sub-[0-9A-Za-z]+")
_PERSON = re.compile(
    r"(?<![A-Za-z])(?P<word>(?:patient|subject|participant|speaker|subj|pat)[-_]?)[0-9]+",
    re.IGNORECASE,
)

Table = Mapping[str, Sequence[str]]  # cells by column


@dataclass(frozen=True, slots=True)
class ProposedLabels:
    """Settings of ``source.labels``, and the share of objects with a row."""

    settings: Mapping[str, Any]
    share: float

    @property
    def sentence(self) -> str:
        columns = names_text(self.settings["columns"])
        share = (
            "Every listed object has"
            if self.share == 1
            else f"{self.share:.0%} of the objects have"
        )
        by = f"matched by column {self.settings['key']}"
        return f"{share} a row in {self.settings['url']}, {by}, with {columns}."


@dataclass(frozen=True, slots=True)
class ProposedSplit:
    settings: Mapping[str, Any]
    groups: int

    @property
    def sentence(self) -> str:
        return (
            f"Keys name {in_count(self.groups)} subjects; none should be both in training and "
            "in validation."
        )

    @property
    def validation_sentence(self) -> str:
        return "This config is for training; a second one with use: val is for validation."


def propose_labels(
    url: str, table: Table, keys: Sequence[str], prefix: str = "", taken: Collection[str] = ()
) -> ProposedLabels | None:
    """Return the labels of a table whose rows are about the objects, or None.

    ``taken`` are the fields of the samples. A column of such a name is not proposed.

    >>> table = {"file": ["a.npy", "b.npy"], "state": ["rest", "task"]}
    >>> propose_labels("t.csv", table, ["data/a.npy", "data/b.npy"]).settings["match"]
    'name'
    """
    best: tuple[float, str, str] = (0.0, "", "")
    for match, names in _names_of_objects(keys, prefix):
        for column, cells in table.items():
            share = _share(names, cells)
            if share > best[0]:
                best = (share, column, match)
    share, key, match = best
    others = {name: cells for name, cells in table.items() if name not in (key, *taken)}
    columns = _label_columns(others) if share >= MIN_MATCHED_SHARE else []
    if not columns:
        return None
    matching = {} if match == "exact" else {"match": match}
    texts = [name for name in columns if not all(map(_is_number, table[name]))]
    classes = {"classes": "auto"} if texts else {}
    settings = {"url": url, "key": key, "columns": columns, **matching, **classes}
    return ProposedLabels(settings, share)


def _share(names: Sequence[str], cells: Sequence[str]) -> float:
    """Return the share of names with a row, or 0 if rows repeat a name."""
    known = set(cells)
    if len(known) < len(cells):
        return 0
    return sum(name in known for name in names) / max(1, len(names))


def _names_of_objects(keys: Sequence[str], prefix: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each value of ``match`` with the names that it looks up, plainest first."""
    yield "exact", list(keys)
    yield "exact", [key.removeprefix(prefix) for key in keys]
    names = [key.rpartition("/")[2] for key in keys]
    yield "name", names
    yield "stem", [name.rpartition(".")[0] or name for name in names]
    if pattern := group_pattern(keys, "key"):
        found = [re.search(pattern, key) for key in keys]
        yield pattern, ["" if one is None else one["key"] for one in found]


def _label_columns(table: Table) -> list[str]:
    """Return the columns with a value in every row, which are numbers or have few distinct ones."""
    return [name for name, cells in table.items() if _is_label(cells)][:MAX_LABEL_COLUMNS]


def _is_label(cells: Sequence[str]) -> bool:
    if not cells or any(cell.strip().lower() in _MISSING for cell in cells):
        return False
    return all(map(_is_number, cells)) or len(set(cells)) <= min(
        MAX_CLASSES, max(2, len(cells) // 2)
    )


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def propose_split(keys: Sequence[str]) -> ProposedSplit | None:
    """Return a split by subjects, or None if keys name fewer than `MIN_GROUPS`.

    >>> propose_split([f"ds/sub-{n:02d}/eeg.edf" for n in range(9)]).settings["group"]
    '(?P<group>sub-[0-9A-Za-z]+)'
    """
    pattern = group_pattern(keys, "group")
    if not pattern:
        return None
    found = [re.search(pattern, key) for key in keys]
    groups = {one["group"] for one in found if one is not None}
    if len(groups) < MIN_GROUPS:
        return None
    return ProposedSplit(
        {"group": pattern, "fractions": dict(FRACTIONS), "use": "train"}, len(groups)
    )


def group_pattern(keys: Sequence[str], name: str) -> str:
    """Return a regular expression for the subject in every key, or "" if a key names none.

    >>> group_pattern(["x/patient_7/a.npy", "x/patient_12/b.npy"], "group")
    '(?P<group>patient_[0-9]+)'
    """
    if keys and all(map(_SUBJECT.search, keys)):
        return f"(?P<{name}>sub-[0-9A-Za-z]+)"
    words = {found["word"] if (found := _PERSON.search(key)) else "" for key in keys}
    if len(words) != 1 or "" in words:
        return ""
    return f"(?P<{name}>{re.escape(words.pop())}[0-9]+)"
