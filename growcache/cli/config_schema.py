"""``growcache schema``: the JSON Schema of a configuration, which editors use."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from growcache.cli.init_text import TEMPLATE
from growcache.config import Config

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_SECTIONS = {"source": "SourceConfig", "sampling": "SamplingConfig", "cache": "CacheConfig"}
_SECTION = re.compile(r"([a-z]\w*):")
_COMMENT = re.compile(r" *# ?(.*)")
_KEY = re.compile(r"(?:\$\{\w+\})?  ([a-z]\w*):")


def config_schema() -> dict[str, Any]:
    """Return the schema. Each key has the comment of a written config as its description."""
    schema = Config.model_json_schema()
    for section, key, comment in commented_keys(TEMPLATE.read_text(encoding="utf-8")):
        for name in (_SECTIONS[section], *(("WeightedSource",) if section == "source" else ())):
            schema["$defs"][name]["properties"][key]["description"] = comment
    return {"$schema": DIALECT, **schema, "title": "growcache configuration"}


def commented_keys(template: str) -> Iterator[tuple[str, str, str]]:
    """Yield the section and name of each key of a section, and the last comment above it."""
    section, comment, ends = "", list[str](), False
    for line in template.splitlines():
        if found := _SECTION.match(line):
            section = found[1]
        elif found := _COMMENT.fullmatch(line):
            comment = [found[1]] if ends else [*comment, found[1]]
            ends = False
            continue
        elif (found := _KEY.match(line)) and section in _SECTIONS:
            yield section, found[1], "\n".join(comment)
        ends = True
