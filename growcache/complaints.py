"""What is wrong with a configuration, in words: where, what was expected, what was found."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import TypeAlias

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from growcache.secrecy import hide, public_url, without_userinfo

ONE, SEVERAL = "one", "several"  # branches of ``source``, of which users need not know

Models: TypeAlias = Mapping[tuple[int | str, ...], type[BaseModel]]


def explain(error: ValidationError, label: str, models: Models) -> str:
    """Return a line per key that is wrong, for two of them.

    Args:
        error: of pydantic's.
        label: of the configuration.
        models: by the place of what they describe.
    """
    found: dict[str, list[ErrorDetails]] = {}
    for item in error.errors():
        found.setdefault(_where(item["loc"], models) or "config", []).append(item)
    lines = [f"{label}: {_complaint(dotted, items, models)}" for dotted, items in found.items()]
    return "\n".join(line[:300] for line in lines[:2])


def _where(loc: tuple[int | str, ...], models: Models) -> str:
    """Return the dotted place that a user knows of one that has the branches of unions in it."""
    if loc[:1] == ("source",) and loc[1:2] in ((ONE,), (SEVERAL,)):
        loc = loc[:1] + loc[2:]
    place = _in_section(loc)
    # What follows section, key and place in a list names the branch of a union, but for
    # mappings of keys of their own.
    most = 2
    if len(place) > 1 and place[:2] in models:
        most = 4 if place[:2] == ("source", "fields") else 3
    most += len(loc) - len(place)
    parts = (str(part) for n, part in enumerate(loc) if n < most or type(part) is int)
    return ".".join(parts)


def _in_section(loc: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Return a place as it is in a section of which there is one: sources may be several."""
    several = len(loc) > 1 and loc[0] == "source" and str(loc[1]).isdigit()
    return loc[:1] + loc[2:] if several else loc


def _complaint(dotted: str, items: list[ErrorDetails], models: Models) -> str:
    kind = items[0]["type"]
    if kind == "extra_forbidden":
        where = _in_section(tuple(dotted.split(".")))
        return f"unknown key {dotted}{_nearest([str(part) for part in where], models)}"
    if kind == "missing":
        return f"{dotted} is missing"
    if isinstance(items[0]["input"], Mapping):  # what is wrong in it tells more than itself
        deepest = max(len(item["loc"]) for item in items)
        items = [item for item in items if len(item["loc"]) == deepest]
    said = [item["msg"].removeprefix("Value error, ") for item in items]
    said = [re.sub("^Input should be ", "expected " * (n == 0), m) for n, m in enumerate(said)]
    if kind == "value_error" and "." not in dotted:  # about several settings together
        return said[0] if dotted == "config" else f"{dotted}: {said[0]}"
    said = [re.sub(r"a valid dictionary( or instance of \w+)?", "a mapping", m) for m in said]
    value = items[0]["input"]
    shown = _shown(dotted, value)
    choices = [
        word
        for item in items
        for word in re.findall(r"'([^']*)'", item["msg"])
        if item["type"] == "literal_error"
    ]
    close = difflib.get_close_matches(str(value), choices, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"{dotted}: {' or '.join(said)}, found {shown}{hint}"


def _shown(dotted: str, value: object) -> str:
    """Return what was found, but nothing that may be a credential."""
    section, key, *_ = (*_in_section(tuple(dotted.split("."))), "", "")
    secret = (section, key) == ("source", "storage_options")
    if secret or isinstance(value, Mapping | list | tuple):
        kinds = {"dict": "a mapping", "str": "text", "list": "a list", "NoneType": "nothing"}
        kind = type(value).__name__
        return kinds.get(kind, f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}")
    return (
        repr(without_userinfo(public_url(hide(value))))
        if isinstance(value, str)
        else repr(value)
    )


def _nearest(where: list[str], models: Models) -> str:
    """Return the known key that may be meant: in its section, then in any."""
    inside = models[()] if len(where) == 1 else models.get((where[0],), models[()])
    inside = models.get(tuple(where[:2]), inside) if len(where) > 2 else inside
    sections = {place[0]: model for place, model in models.items() if len(place) == 1}
    known = list(inside.model_fields)
    everywhere = {key: name for name, model in sections.items() for key in model.model_fields}
    for choices in (known, list(everywhere)):
        if close := difflib.get_close_matches(where[-1], choices, n=1):
            place = f"{everywhere[close[0]]}." if choices is not known else ""
            return f"; did you mean {place}{close[0]}?"
    return f"; known are {', '.join(known)}"
