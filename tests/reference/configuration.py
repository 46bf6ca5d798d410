"""The keys of docs/reference/configuration.md, written from the JSON Schema of a configuration."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

Node = Mapping[str, Any]
SECTIONS = {
    "source": "SourceConfig",
    "split": "SplitConfig",
    "sampling": "SamplingConfig",
    "cache": "CacheConfig",
}
MIXED = "WeightedSource"


class Key(NamedTuple):
    """One key as the page shows it."""

    name: str
    kind: str
    default: str
    meaning: str
    inner: tuple[Key, ...] = ()


def configuration_markdown(schema: Node) -> str:
    """Return a heading for each section and key, with the kind, the default and the meaning."""
    parts = []
    for section, model in SECTIONS.items():
        parts.append(f"## {section}")
        parts += [_as_markdown(section, key) for key in _keys(schema, schema["$defs"][model])]
        if section == "source":
            parts.append(_as_markdown(section, _weight(schema)))
    return "\n\n".join(parts) + "\n"


def _keys(schema: Node, model: Node) -> Iterator[Key]:
    for name, node in model["properties"].items():
        inner = tuple(
            key for ref in _references(node) for key in _keys(schema, _named(schema, ref))
        )
        default = _default(node, name in model.get("required", ()))
        yield Key(name, kind_of(node, name), default, node["description"], inner)


def _weight(schema: Node) -> Key:
    """`weight`, which only the sources of a list have."""
    keys = _keys(schema, schema["$defs"][MIXED])
    return next(key for key in keys if key.name == "weight")


def _references(node: Node) -> Iterator[str]:
    for choice in (node, *node.get("anyOf", ()), node.get("additionalProperties") or {}):
        if isinstance(choice, Mapping) and "$ref" in choice:
            yield choice["$ref"].rpartition("/")[2]


def _named(schema: Node, name: str) -> Node:
    found = schema["$defs"][name]
    return next((one for one in found.get("anyOf", ()) if "properties" in one), found)


def kind_of(node: Node, name: str = "") -> str:
    """Return what a value may be, in words.

    >>> kind_of({"type": "integer", "minimum": 1, "maximum": 9})
    'integer from 1 to 9'
    >>> kind_of({"anyOf": [{"type": "number"}, {"type": "null"}]}, "timeout_seconds")
    'seconds'
    >>> kind_of({"enum": ["fifo", "none"], "type": "string"})
    '`fifo` or `none`'
    """
    kinds = dict.fromkeys(_kinds(node))
    if {"pattern", "integer"} <= {_simple(one) for one in node.get("anyOf", ())}:
        kinds = {"bytes, such as `10GB`": None}
    text = _joined([*kinds])
    return text.replace("number", "seconds") if name.endswith("_seconds") else text


def _simple(node: Node) -> str:
    return "pattern" if "pattern" in node else str(node.get("type"))


def _kinds(node: Node) -> Iterator[str]:
    if "anyOf" in node:
        for choice in node["anyOf"]:
            yield from _kinds(choice)
    elif "enum" in node or "const" in node:
        yield from (f"`{value}`" for value in node.get("enum", [node.get("const")]))
    elif "$ref" in node:
        yield "object"
    elif node["type"] == "array":
        items = node.get("items")
        yield f"list of {kind_of(items)}" if items else "list"
    elif node["type"] != "null":
        yield _KINDS[node["type"]] + _range(node)


_KINDS = {
    "string": "text",
    "integer": "integer",
    "number": "number",
    "boolean": "`true` or `false`",
    "object": "object",
}


def _range(node: Node) -> str:
    least, most = node.get("minimum"), node.get("maximum")
    above = node.get("exclusiveMinimum")
    if least is not None and most is not None:
        return f" from {least:g} to {most:g}"
    if above is not None:
        limit = " of at least 1" if node["type"] == "integer" else f" above {above:g}"
        return limit + (f", at most {most:g}" if most is not None else "")
    return f" of at least {least:g}" if least is not None else ""


def _joined(kinds: list[str]) -> str:
    return " or ".join(filter(None, [", ".join(kinds[:-1]), *kinds[-1:]]))


def _default(node: Node, required: bool) -> str:
    if required:
        return "required"
    if "default" not in node:
        return "required, unless another key says where the samples are"
    return f"default {_value(node['default'], kind_of(node).startswith('bytes'))}"


def _value(value: Any, is_bytes: bool) -> str:
    if value is None:
        return "none"
    if is_bytes and value % 10**9 == 0:
        return f"`{value // 10**9}GB`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, float):
        return f"`{value:g}`"
    return "`{}`" if isinstance(value, dict) else f"`{value}`"


def _as_markdown(section: str, key: Key) -> str:
    lines = [f"### {section}.{key.name}", f"*{key.kind} · {key.default}*", _prose(key.meaning)]
    if key.inner:
        lines.append(_table(key.inner))
    return "\n\n".join(lines)


def _table(keys: tuple[Key, ...]) -> str:
    rows = [
        (f"`{key.name}`", key.kind, key.default.removeprefix("default "), _marked(key.meaning))
        for key in keys
    ]
    lines = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows]
    return "\n".join(
        [_HEADINGS, "| --- | --- | --- | --- |", *(f"| {line} |" for line in lines)]
    )


_HEADINGS = "| key | is | default | means |"


def _prose(comment: str) -> str:
    """Return a comment of the template as Markdown; one in columns stays as it is.

    >>> _prose("See docs/guides/plan.md about\\n{x: [1]}")
    'See [plan](../guides/plan.md) about `{x: [1]}`'
    """
    if re.search(r"\S {2,}\S", comment):
        return f"```text\n{comment}\n```"
    items: list[str] = []
    for line in re.split(r"\n| \| (?=\w+: )", comment):
        if items and not _VALUE.match(line):
            items[-1] += f" {line}"
        else:
            items.append(line)
    texts = [_marked(item) for item in items]
    first = [] if _VALUE.match(items[0]) else texts[:1]
    return "\n\n".join([*first, "\n".join(_item(text) for text in texts[len(first) :])]).strip()


_VALUE = re.compile(r"(\w+(?: \| \w+)*): ")
# Braces, one pair in another at most, with what touches them; a group of a regular expression.
_CODE = re.compile(
    r"(?<!`)([^\s`(]*\{(?:[^{}`]|\{[^{}`]*\})*\}[^\s`,.;)]*(?:\.npy)?|\(\?P<.*?\))(?!`)"
)


def _item(text: str) -> str:
    return "- " + _VALUE.sub(lambda found: f"`{found[1]}`: ", text, count=1)


def _marked(text: str) -> str:
    return re.sub(r"docs/(\w+)/(\w+)\.md", r"[\2](../\1/\2.md)", _CODE.sub(r"`\1`", text))
