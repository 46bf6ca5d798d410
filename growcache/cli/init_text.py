"""The text of a config: fill in the commented template, check it and write it."""

from __future__ import annotations

import math
import os
import string
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from growcache.cli.init_choices import ConfigChoices
from growcache.cli.other_kinds import READER
from growcache.cli.terminal import print_to_stderr
from growcache.config_text import load_config
from growcache.errors import ConfigError, MissingLibraryError
from growcache.formats import check_format
from growcache.modes import FILE_MODE
from growcache.usercode import printable

TEMPLATE = Path(__file__).with_name("config_template.yaml")
COMMENT_WIDTH = 88


def as_yaml(value: object) -> str:
    """Return a value as one line of YAML."""
    text = yaml.safe_dump(
        value, default_flow_style=True, width=math.inf, allow_unicode=True, sort_keys=False
    )
    # YAML does not count a plain \xa0 as a space.
    return text.removesuffix("...\n").rstrip("\n")


def config_text(file: str = "growcache.yaml", choices: ConfigChoices | None = None) -> str:
    chosen = choices or ConfigChoices()
    reason = [f"Chosen: {chosen.bound_reason}."] if chosen.bound_reason else []
    return string.Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        file=file,
        url=as_yaml(chosen.url),
        findings=_as_comment(chosen.findings) + _code_as_comment(chosen.reader),
        format=as_yaml(chosen.format),
        options=as_yaml(dict(chosen.options)),
        labels_findings=_as_comment(chosen.labels_findings)
        + _offer("  # labels: ", chosen.labels_offer),
        labels=_or_null(chosen.labels),
        on_missing=chosen.on_missing,
        split_findings=_as_comment(chosen.split_findings, indent="")
        + _offer("# split: ", chosen.split_offer),
        split=_or_null(chosen.split),
        rate=_as_comment([chosen.rate] if chosen.rate else []),
        storage_options=as_yaml(dict(chosen.storage_options)),
        path=as_yaml(chosen.cache_path),
        bound_reason=_as_comment(reason),
        max_bytes=chosen.max_bytes,
    )


def _as_comment(sentences: Sequence[str], indent: str = "  ") -> str:
    wrapper = textwrap.TextWrapper(
        COMMENT_WIDTH,
        initial_indent=f"{indent}# > ",
        subsequent_indent=f"{indent}#   ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    texts = map(printable, sentences)  # keys of objects may contain line breaks
    return "".join(f"{line}\n" for text in texts for line in wrapper.wrap(text))


def _offer(start: str, settings: Mapping[str, Any] | None) -> str:
    return "" if settings is None else f"{start}{printable(as_yaml(dict(settings)))}\n"


def _or_null(settings: Mapping[str, Any] | None) -> str:
    return "null" if settings is None else as_yaml(dict(settings))


def _code_as_comment(code: str) -> str:
    lines = [f"# {READER}.py", *code.splitlines()] if code else []
    return "".join(f"  #   {line}".rstrip() + "\n" for line in lines)


def checked_config_text(file: str, choices: ConfigChoices) -> str:
    text = config_text(file, choices)
    load_config(yaml.safe_load(text))
    try:
        check_format(choices.format, choices.options, (choices.url,))
    except MissingLibraryError as error:
        print_to_stderr(str(error))
    return text


def write_config(path: Path, choices: ConfigChoices, *, force: bool = False) -> None:
    refuse_existing(path, force=force)
    text = checked_config_text(str(path), choices)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        # The owner may write secrets into the file.
        temporary.touch(FILE_MODE, exist_ok=False)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", code="GC106") from None
    finally:
        temporary.unlink(missing_ok=True)


def refuse_existing(path: Path, *, force: bool) -> None:
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; name a file in it", code="GC106")
    if path.exists() and not force:
        raise ConfigError(f"{path} exists; name another file, or add --force", code="GC106")
