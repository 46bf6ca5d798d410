"""Propose datasets and options for HDF5 files, including MATLAB, NetCDF, NWB and AnnData."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from growcache.cli.propose_options import array_options, names_text
from growcache.cli.propose_recordings import Candidate
from growcache.errors import FormatError
from growcache.formats.hdf5_dataset import DatasetLayout
from growcache.humanize import plural

MAX_DATASETS_TOGETHER = 8  # that become fields of one sample
MIN_GROUPS, ALIKE_SHARE = 3, 0.8  # groups with at least these numbers count as samples
MAX_DATASETS_SHOWN = 4  # the largest ones
MATLAB, NETCDF, NWB, ANNDATA = "MATLAB v7.3", "NetCDF-4", "NWB", "AnnData"
SCALED = "attributes say what the stored numbers mean; scale: none takes them as they are."
_NWB_TIMES = ("timestamps",)


@dataclass(frozen=True, slots=True)
class HDF5Contents:
    datasets: Sequence[DatasetLayout]  # readable ones
    unreadable: Sequence[str] = ()  # reasons of the others
    flavour: str = ""  # the program or convention that wrote it; empty for plain files
    coordinates: frozenset[str] = frozenset()  # datasets that are axes of others
    scaled: frozenset[str] = frozenset()  # datasets with a scale in their attributes


def hdf5_candidates(found: HDF5Contents, *, many: bool) -> list[Candidate]:
    listed = _listed_text(found)
    if found.flavour == ANNDATA:
        return [_cells_candidate(found, listed)]
    if not found.flavour and (group := groups_of_samples([one.path for one in found.datasets])):
        whole = f"Each group of {group} is a sample, and its datasets are the fields."
        return [({"group": group}, (listed, whole))]
    # Datasets whose names start with # are MATLAB's own.
    shown = [one for one in found.datasets if not one.path.startswith("#")]
    arrays = [one for one in shown if math.prod(one.shape) > 1] or [
        one for one in shown if one.shape
    ]
    values = [one for one in arrays if one.path not in found.coordinates] or arrays
    numbers = [one for one in values if not one.string_storage] or values
    if not numbers:
        raise FormatError(f"{listed} None is an array")
    main = max(_preferred(numbers, found.flavour), key=_nbytes)
    siblings = [one for one in shown if _folder(one.path) == _folder(main.path)]
    # An array next to scalars is usually one sample, such as an image with its label.
    has_scalars = not found.flavour and not all(one.shape for one in siblings)
    options, sentence = array_options(main.shape, main.dtype.itemsize, many=many or has_scalars)
    if main.string_storage:
        options, sentence = {"axis": 0}, "Each of its texts is a sample."
    datasets = _together(siblings, main, options, found)
    sentences = [listed, f"Of {main.path}: {sentence}", *_flavour_sentences(found, main)]
    taken = datasets.values() if isinstance(datasets, dict) else datasets
    if meant := [path for path in taken if path in found.scaled]:
        options = {**options, "scale": "cf"}
        sentences.append(f"{names_text(meant)}: {SCALED}")
    return [({"datasets": datasets, **options}, sentences)]


def groups_of_samples(paths: Sequence[str]) -> str:
    """Return the numbered groups with equal datasets, which are samples, or "".

    >>> groups_of_samples([f"data/demo_{n}/{name}" for n in range(5) for name in ("actions", "obs/image")])
    'data/*'
    """
    for depth in (0, 1):
        children: dict[str, dict[str, set[str]]] = {}
        for path in paths:
            parts = path.split("/")
            if len(parts) > depth + 1:
                of_folder = children.setdefault("/".join([*parts[:depth], "*"]), {})
                of_folder.setdefault(parts[depth], set()).add("/".join(parts[depth + 1 :]))
        for group, held in children.items():
            words = {name.rstrip("0123456789") for name in held}
            is_numbered = len(words) == 1 and not words & set(held)
            alike = Counter(map(frozenset, held.values())).most_common(1)[0][1]
            if len(held) >= MIN_GROUPS and is_numbered and alike >= ALIKE_SHARE * len(held):
                return group
    return ""


def _cells_candidate(found: HDF5Contents, listed: str) -> Candidate:
    rows = {one.path: one.shape[0] for one in found.datasets if one.shape}
    if cells := rows.get("X", rows.get("X/indptr", 1) - 1):
        options, sentences = cells_options([path for path in rows if rows[path] == cells])
        return options, [listed, *sentences]
    raise FormatError(f"{listed} None is X, the cells")


def cells_options(paths: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return options for rows of AnnData's X with the codes of ``paths``, and sentences.

    >>> cells_options(["X/data", "obs/cell_type/codes"])[0]
    {'datasets': {'x': 'X', 'cell_type': 'obs/cell_type/codes'}, 'axis': 0}
    """
    columns = [path for path in paths if path.startswith("obs/") and path.endswith("/codes")]
    codes = {path.split("/")[1]: path for path in columns[: MAX_DATASETS_TOGETHER - 1]}
    sentences = ["Each row of X, a cell, is a sample; sparse: ragged keeps sparse rows sparse."]
    if codes:
        names = names_text(list(codes))
        sentences.append(f"It has the codes of {names}; obs/NAME/categories holds their texts.")
    return {"datasets": {"x": "X", **codes}, "axis": 0}, sentences


def _preferred(arrays: Sequence[DatasetLayout], flavour: str) -> Sequence[DatasetLayout]:
    """Return the arrays with measured values."""
    if flavour == NWB:
        return [one for one in arrays if one.path.endswith("/data")] or arrays
    return arrays


def _together(
    siblings: Sequence[DatasetLayout],
    main: DatasetLayout,
    options: Mapping[str, Any],
    found: HDF5Contents,
) -> list[str] | dict[str, str]:
    if found.flavour == NWB:
        name = _folder(main.path).rpartition("/")[2] or "x"
        times = [one.path for one in siblings if one.path.endswith(_NWB_TIMES)]
        return {name: main.path, **dict.fromkeys(("timestamps",) * len(times), *times)}
    if options.get("axis"):  # other datasets may lack this axis, or use it for something else
        return [main.path]
    together = [one.path for one in siblings if _goes_along(one, main, options)]
    return together if len(together) <= MAX_DATASETS_TOGETHER else [main.path]


def _goes_along(one: DatasetLayout, main: DatasetLayout, options: Mapping[str, Any]) -> bool:
    if not options:  # the object is one sample, in which arrays of text cannot be values
        return not (one.string_storage and one.shape)
    is_row_of_text = "window" not in options and len(one.shape) == 1
    return one.shape[:1] == main.shape[:1] and (not one.string_storage or is_row_of_text)


def _flavour_sentences(found: HDF5Contents, main: DatasetLayout) -> list[str]:
    if found.flavour == MATLAB and len(main.shape) > 1:
        there, here = list(reversed(main.shape)), list(main.shape)
        return [
            f"MATLAB's axes are in reverse here: {main.path} is {there} in MATLAB, {here} here."
        ]
    return []


def _listed_text(found: HDF5Contents) -> str:
    dtypes = {
        one.path: "str" if one.string_storage else one.dtype.name for one in found.datasets
    }
    largest = sorted(found.datasets, key=_nbytes, reverse=True)
    shown = [f"{one.path} {dtypes[one.path]}{list(one.shape)}" for one in largest]
    article = "A" if found.flavour in (MATLAB, NETCDF) else "An"
    kind = f"{article} {found.flavour or 'HDF5'} file"
    more = ["…"] if len(shown) > MAX_DATASETS_SHOWN else []
    named = ", ".join([*shown[:MAX_DATASETS_SHOWN], *more])
    listed = f"{kind} with {plural(len(found.datasets), 'dataset')}: {named}."
    if found.unreadable:
        reason = found.unreadable[0].partition("; ")[0].partition(": ")[2]
        listed += f" {plural(len(found.unreadable), 'other')}: {reason}."
    return listed


def _nbytes(one: DatasetLayout) -> int:
    return math.prod(one.shape) * one.dtype.itemsize


def _folder(path: str) -> str:
    return path.rpartition("/")[0]
