"""``growcache init``: write a commented config, from options, a probe of the source, and answers."""

from __future__ import annotations

import math
import os
import shutil
import string
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import typer
import yaml

from growcache.cache.files import FILE_MODE
from growcache.cli.humanize import as_size, in_bytes, in_count, plural
from growcache.cli.other_kinds import READER
from growcache.cli.source_probe import PROBE_SECONDS, ProbedSource, probe_source
from growcache.cli.terminal import can_ask, fold_to_width, spinner
from growcache.config import SourceConfig
from growcache.config_text import load_config
from growcache.errors import ConfigError, GrowcacheError, MissingLibraryError, StoreError
from growcache.formats import check_format
from growcache.secrecy import url_without_secrets
from growcache.usercode import printable

EXAMPLE_URL = "s3://my-bucket/recordings/**/*.npy"
TEMPLATE = Path(__file__).with_name("config_template.yaml")
COMMENT = textwrap.TextWrapper(88, initial_indent="  # > ", subsequent_indent="  #   ")
RAW_GUESS = {"dtype": "<f4", "window": 4096}
RAW_GUESS_REASON = "A guess: set dtype, shape and window to what was recorded."
Prompt = Callable[..., Any]  # typer.prompt, or a substitute in tests


@dataclass(frozen=True, slots=True)
class ConfigChoices:
    """The settings of a config that are not the defaults."""

    url: str = EXAMPLE_URL
    format: str = "npy"
    options: Mapping[str, Any] = field(default_factory=dict)
    storage_options: Mapping[str, Any] = field(default_factory=dict)
    cache_path: str = "./cache"
    max_bytes: str = "10GB"
    findings: Sequence[str] = ()  # sentences about the objects
    reader: str = ""  # source of a function that decodes them, to be saved by the user
    bound_reason: str = ""  # explains max_bytes


@dataclass(frozen=True, slots=True)
class InitOptions:
    url: str | None = None
    format: str | None = None
    cache_path: str | None = None
    max_bytes: str | None = None
    endpoint_url: str | None = None
    anon: bool = False
    probe: bool = True
    force: bool = False

    @property
    def storage_options(self) -> dict[str, Any]:
        endpoint = {"endpoint_url": self.endpoint_url} if self.endpoint_url else {}
        return {**endpoint, **({"anon": True} if self.anon else {})}


def init_config(file: Path, given: InitOptions, *, yes: bool) -> None:
    """Write a config, or print it if the file is ``-``."""
    shown = str(file) == "-"
    if not shown:
        _refuse_existing(file, force=given.force)
    asks = can_ask() and not (yes or shown)
    choices = ask_for_choices(given) if asks else choose_without_asking(given)
    if shown:
        typer.echo(_checked_config_text("growcache.yaml", choices), nl=False)
        return
    write_config(file, choices, force=given.force)
    edit = "set source.url in it, then " if choices.url == EXAMPLE_URL else ""
    written = f"Wrote {file}; {edit}start the service: growcache run {file}"
    typer.echo(fold_to_width(written, sys.stdout))


# ------------------------------------------------------------------ the text


def config_text(file: str = "growcache.yaml", choices: ConfigChoices | None = None) -> str:
    chosen = choices or ConfigChoices()
    reason = [f"Chosen: {chosen.bound_reason}."] if chosen.bound_reason else []
    return string.Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        file=file,
        url=_as_yaml(chosen.url),
        findings=_as_comment(chosen.findings) + _code_as_comment(chosen.reader),
        format=_as_yaml(chosen.format),
        options=_as_yaml(dict(chosen.options)),
        storage_options=_as_yaml(dict(chosen.storage_options)),
        path=_as_yaml(chosen.cache_path),
        bound_reason=_as_comment(reason),
        max_bytes=chosen.max_bytes,
    )


def _as_comment(sentences: Sequence[str]) -> str:
    texts = map(printable, sentences)  # keys of objects may hold line breaks
    return "".join(f"{line}\n" for text in texts for line in COMMENT.wrap(text))


def _code_as_comment(code: str) -> str:
    lines = [f"# {READER}.py", *code.splitlines()] if code else []
    return "".join(f"  #   {line}".rstrip() + "\n" for line in lines)


def _as_yaml(value: object) -> str:
    text = yaml.safe_dump(
        value, default_flow_style=True, width=math.inf, allow_unicode=True, sort_keys=False
    )
    return text.removesuffix("...\n").rstrip("\n")  # a plain \xa0 is no space to YAML


def _checked_config_text(file: str, choices: ConfigChoices) -> str:
    text = config_text(file, choices)
    load_config(yaml.safe_load(text))
    try:
        check_format(choices.format, choices.options, (choices.url,))
    except MissingLibraryError as error:
        print_to_stderr(str(error))
    return text


def write_config(path: Path, choices: ConfigChoices, *, force: bool = False) -> None:
    _refuse_existing(path, force=force)
    text = _checked_config_text(str(path), choices)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.touch(FILE_MODE, exist_ok=False)  # its owner may write secrets into it
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    finally:
        temporary.unlink(missing_ok=True)


def _refuse_existing(path: Path, *, force: bool) -> None:
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; name a file in it")
    if path.exists() and not force:
        raise ConfigError(f"{path} exists; name another file, or add --force")


# ------------------------------------------------------------------ the choices


def choose_without_asking(given: InitOptions) -> ConfigChoices:
    found = None
    if given.url and given.probe:
        try:
            found = _probe_with_spinner(given)
        except StoreError as error:
            failure = f"could not look at {url_without_secrets(given.url)}: {error}"
            if not given.force:
                raise StoreError(
                    f"{failure}; nothing was written. Mend that, or add --force for a config whose "
                    "format is a guess"
                ) from None
            print_to_stderr(f"{failure}; the format is a guess")
    return propose_choices(given, found)


def ask_for_choices(given: InitOptions, prompt: Prompt = typer.prompt) -> ConfigChoices:
    given, found = _ask_for_source(given, prompt)
    if found is not None:
        more, at_least = ("", "") if found.is_whole_listing else (" and more", "at least ")
        listed = f"Found {plural(found.objects, 'object')}{more}, {in_bytes(found.nbytes)}"
        count, size = in_count(found.samples), in_bytes(found.sample_bytes)
        samples = f"; as proposed, {at_least}about {count} samples of {size}"
        print_to_stderr(f"{listed}{samples if found.samples else ''}.")
    proposed = propose_choices(given, found)
    for sentence in proposed.findings:
        print_to_stderr(f"  {sentence}")
    return _ask_for_changes(proposed, given, prompt)


def _ask_for_source(
    given: InitOptions, prompt: Prompt
) -> tuple[InitOptions, ProbedSource | None]:
    while True:
        if given.url is None:
            print_to_stderr(
                "Where are the objects? s3://, gs://, az://, https://, a path …, with globs."
            )
            given = replace(given, url=prompt("URL", default=EXAMPLE_URL))
        if given.url == EXAMPLE_URL or not given.probe:
            return given, None
        try:
            return given, _probe_with_spinner(given)
        except GrowcacheError as error:
            print_to_stderr(f"Could not look there: {error}")
        print_to_stderr(
            "Another URL, an endpoint such as http://minio:9000, anon, or Enter to go on."
        )
        answer = str(prompt("Try", default="", show_default=False)).strip()
        if not answer:
            return given, None
        given = apply_answer(given, answer)


def apply_answer(given: InitOptions, answer: str) -> InitOptions:
    """Return the options after an answer to "what else shall be tried?".

    >>> apply_answer(InitOptions(url="s3://b/*"), "http://minio:9000").endpoint_url
    'http://minio:9000'
    >>> apply_answer(InitOptions(url="s3://b/*"), "s3://c/*").url
    's3://c/*'
    """
    if answer == "anon":
        return replace(given, anon=True)
    bucket = (given.url or "").startswith(("s3://", "s3a://"))
    if bucket and answer.startswith(("http://", "https://")):
        return replace(given, endpoint_url=answer)
    return replace(given, url=answer)


def _ask_for_changes(
    proposed: ConfigChoices, given: InitOptions, prompt: Prompt
) -> ConfigChoices:
    form, options = proposed.format, proposed.options
    while True:
        if given.format is None:
            form = str(prompt("Format", default=form))
        if form != proposed.format:
            options = {}
        text = str(prompt("Options of it", default=_as_yaml(dict(options))))
        try:
            options = yaml.safe_load(text) or {}
            if not isinstance(options, dict):
                raise ConfigError(f"expected options such as {{axis: 0}}, found {text!r}")
            check_format(form, options)
            break
        except MissingLibraryError:  # the config may be meant for another machine
            break
        except (yaml.YAMLError, ConfigError) as error:
            options = {}
            print_to_stderr(str(error))
    path = given.cache_path or str(prompt("Folder of the cache", default=proposed.cache_path))
    chosen = replace(proposed, format=form, options=options, cache_path=path)
    if given.max_bytes:
        return chosen
    reason = proposed.bound_reason
    print_to_stderr(f"  {reason[:1].upper()}{reason[1:]}.")
    bound = str(prompt("Bound of the cache", default=proposed.max_bytes))
    same = bound == proposed.max_bytes
    return replace(chosen, max_bytes=bound, bound_reason=reason if same else "")


def propose_choices(given: InitOptions, found: ProbedSource | None) -> ConfigChoices:
    known = ConfigChoices(
        url=given.url or EXAMPLE_URL,
        format=given.format or ConfigChoices().format,
        storage_options=given.storage_options,
        cache_path=given.cache_path or ConfigChoices().cache_path,
    )
    if given.format == "raw":
        known = replace(known, options=RAW_GUESS, findings=[RAW_GUESS_REASON])
    if found and given.format in (None, found.format):
        known = replace(
            known,
            url=found.url or known.url,
            format=found.format,
            options=found.options,
            findings=found.findings,
            reader=found.reader,
        )
    if given.max_bytes:
        return replace(known, max_bytes=given.max_bytes)
    if given.url is None:
        return known
    folders = (Path(known.cache_path), *Path(known.cache_path).absolute().parents)
    free = shutil.disk_usage(next(folder for folder in folders if folder.is_dir())).free
    nbytes = found.nbytes if found and found.is_whole_listing else None
    bound, reason = propose_bound(free, nbytes)
    return replace(known, max_bytes=as_size(bound), bound_reason=reason)


def propose_bound(free_bytes: int, source_bytes: int | None) -> tuple[int, str]:
    steps = [m * 10**e for e in range(6, 18) for m in (1, 2, 5)]  # 1, 2, 5, 10, … MB
    half, free = free_bytes // 2, in_bytes(free_bytes)
    if source_bytes is not None and (needed := source_bytes * 5 // 4 + 64_000_000) < half:
        reason = f"{in_bytes(source_bytes)} of objects fit in as a whole; {free} are free"
        return next(step for step in steps if step >= needed), reason
    below = max([step for step in steps if step <= half], default=steps[0])
    return below, f"about half of the {free} that are free"


def _probe_with_spinner(given: InitOptions) -> ProbedSource:
    source = SourceConfig(url=(given.url or "",), storage_options=given.storage_options)
    with spinner(sys.stderr, f"looking at {given.url} (at most {PROBE_SECONDS:g} s) …"):
        return probe_source(source)


def print_to_stderr(text: str) -> None:
    typer.echo(fold_to_width(text, sys.stderr), err=True)
