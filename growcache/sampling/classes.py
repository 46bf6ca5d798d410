"""The number of each class in a table's column."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from growcache.config_source import AUTO, LabelsConfig, SourceConfig
from growcache.errors import ConfigError
from growcache.sampling.label_table import (
    EMPTY_CELL,
    INTEGER_CELL,
    NO_ROW,
    Column,
    IntColumn,
    KeyedTable,
    TextColumn,
)

Classes: TypeAlias = Mapping[str, tuple[str, ...]]  # by field

MOST_CLASSES = 1 << 16  # every shard's sidecar has their names
MOST_CLASS_CHARACTERS = 1 << 21  # of all names together
NO_CLASS = NO_ROW


def decide_classes(
    sources: Sequence[SourceConfig], tables: Sequence[KeyedTable | None]
) -> dict[str, tuple[str, ...]]:
    """Return the classes of each column that has any: the configured ones, or all in the tables."""
    named: dict[str, tuple[str, ...]] = {}
    found: dict[str, set[str]] = {}
    for source, table in zip(sources, tables, strict=True):
        if table is None or source.labels is None:
            continue
        for name, names in _classes_of_columns(source.labels, table).items():
            if isinstance(names, str):
                found.setdefault(name, set()).update(_filled(table.column(name), name))
            elif named.setdefault(name, names) != names:
                raise ConfigError(
                    f"source.labels.classes: {name} has other classes in another source; name "
                    "the same ones, in the same order",
                    code="GC112",
                )
    if both := named.keys() & found.keys():
        raise ConfigError(
            f"source.labels.classes: {min(both)} is auto in one source and a list in another; "
            "name the same list in both",
            code="GC112",
        )
    return named | {name: sorted_classes(some, name) for name, some in found.items()}


def _classes_of_columns(
    labels: LabelsConfig, table: KeyedTable
) -> dict[str, tuple[str, ...] | str]:
    if labels.classes is None:
        return {}
    if isinstance(labels.classes, str):
        texts = (n for n in labels.columns if isinstance(table.column(n), TextColumn))
        return dict.fromkeys(texts, AUTO)
    if isinstance(labels.classes, tuple):
        return {labels.columns[0]: labels.classes}
    return dict(labels.classes)


def sorted_classes(names: Iterable[str], field: str) -> tuple[str, ...]:
    """Return the names in order, which is numeric if all are integers.

    >>> sorted_classes({"10", "9"}, "digit"), sorted_classes({"task", "rest", "10"}, "state")
    (('9', '10'), ('10', 'rest', 'task'))
    """
    found = set(names)
    if not found:
        raise ConfigError(
            f"classes: auto: {field} is empty everywhere, so there are no classes", code="GC112"
        )
    if len(found) > MOST_CLASSES:
        raise ConfigError(
            f"classes: auto: {field} has {len(found):,} different values, and a cache has at most "
            f"{MOST_CLASSES:,} classes; name those that are meant, or leave classes out",
            code="GC112",
        )
    if (characters := sum(map(len, found))) > MOST_CLASS_CHARACTERS:
        raise ConfigError(
            f"classes: auto: the {len(found):,} different values of {field} have "
            f"{characters:,} characters, more than {MOST_CLASS_CHARACTERS:,}, which is too "
            "much for classes; leave it out",
            code="GC112",
        )
    if all(map(INTEGER_CELL.fullmatch, found)):
        return tuple(sorted(found, key=int))
    return tuple(sorted(found))


def class_numbers(column: Column, names: Sequence[str], field: str) -> IntColumn:
    """Return each row's class, or `NO_CLASS` if its cell is not one of the names."""
    numbers = {name: number for number, name in enumerate(names)}
    cells = (numbers.get(name, NO_CLASS) for name in _cell_names(column, field))
    return np.fromiter(cells, np.int64, len(column))


def _filled(column: Column, field: str) -> Iterator[str]:
    return (name for name in _cell_names(column, field) if not EMPTY_CELL.fullmatch(name))


def _cell_names(column: Column, field: str) -> Iterator[str]:
    if isinstance(column, TextColumn):
        return iter(column)
    if column.dtype.kind == "f":
        _require_integers(column, field)
        return ("" if np.isnan(cell) else str(int(cell)) for cell in column.tolist())
    return map(str, column.tolist())


def _require_integers(column: Column, field: str) -> None:
    numbers = np.asarray(column)
    odd = numbers[~np.isnan(numbers) & (numbers != np.floor(numbers))]
    if len(odd) or np.isinf(numbers).any():
        raise ConfigError(
            f"source.labels.classes: expected texts or integers in {field}, found "
            f"{odd[0] if len(odd) else np.inf}; leave it out of classes",
            code="GC112",
        )
