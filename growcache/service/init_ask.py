"""What goes into a config: from options, from a look at the source, and from answers."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer
import yaml
from rich.console import Console
from rich.text import Text

from growcache.config import SourceConfig
from growcache.errors import ConfigError, GrowcacheError, MissingLibraryError, StoreError
from growcache.remote.formats import check_format
from growcache.secrecy import public_url
from growcache.service.init import EXAMPLE_URL, Choices
from growcache.service.look import SECONDS, Look, look_at
from growcache.service.proposal import propose_bound
from growcache.service.terminal import folded, redraws
from growcache.service.words import as_size, in_bytes, in_count, plural

RAW_GUESS = {"dtype": "<f4", "window": 4096}
RAW_GUESSED = "A guess: set dtype, shape and window to what was recorded."
Ask = Callable[..., Any]  # typer.prompt, and what tests put in its place


@dataclass(frozen=True, slots=True)
class Given:
    """What the command line says; None where it says nothing."""

    url: str | None = None
    format: str | None = None
    path: str | None = None
    max_bytes: str | None = None
    endpoint_url: str | None = None
    anon: bool = False
    look: bool = True
    force: bool = False

    @property
    def storage_options(self) -> dict[str, Any]:
        """The options of the store that follow from it."""
        found: dict[str, Any] = {}
        if self.endpoint_url:
            found["endpoint_url"] = self.endpoint_url
        if self.anon:
            found["anon"] = True
        return found


def choose(given: Given) -> Choices:
    """Return what goes into the config, without a question.

    Raises:
        ConfigError: a URL that no store can have.
        StoreError: the source could not be looked at, and a guess was not asked for.
    """
    look = None
    if given.url and given.look:
        try:
            look = look_with_spinner(given)
        except StoreError as error:
            said = f"could not look at {public_url(given.url)}: {error}"
            if not given.force:
                raise StoreError(
                    f"{said}; nothing was written. Mend that, or add --force for a config whose "
                    "format is a guess"
                ) from None
            say(f"{said}; the format is a guess")
    return choices_of(given, look)


def ask(given: Given, prompt: Ask = typer.prompt) -> Choices:
    """Return what goes into the config, from answers where the command line says nothing."""
    given, look = _ask_where(given, prompt)
    if look is not None:
        say(words_of(look))
    proposed = choices_of(given, look)
    for sentence in proposed.seen:
        say(f"  {sentence}")
    return _confirm(proposed, given, prompt)


def _ask_where(given: Given, prompt: Ask) -> tuple[Given, Look | None]:
    """Ask where the objects are, until something is found there or nobody minds."""
    while True:
        if given.url is None:
            say("Where are the objects? s3://, gs://, az://, https://, a path …, with globs.")
            given = replace(given, url=prompt("URL", default=EXAMPLE_URL))
        if given.url == EXAMPLE_URL or not given.look:
            return given, None
        try:
            return given, look_with_spinner(given)
        except GrowcacheError as error:
            say(f"Could not look there: {error}")
        say("Another URL, an endpoint such as http://minio:9000, anon, or Enter to go on.")
        answer = str(prompt("Try", default="", show_default=False)).strip()
        if not answer:
            return given, None
        given = amended(given, answer)


def amended(given: Given, answer: str) -> Given:
    """Return what is known after an answer to "what else shall be tried?".

    >>> amended(Given(url="s3://b/*"), "http://minio:9000").endpoint_url
    'http://minio:9000'
    >>> amended(Given(url="s3://b/*"), "s3://c/*").url
    's3://c/*'
    """
    if answer == "anon":
        return replace(given, anon=True)
    bucket = (given.url or "").startswith(("s3://", "s3a://"))
    if bucket and answer.startswith(("http://", "https://")):
        return replace(given, endpoint_url=answer)
    return replace(given, url=answer)


def _confirm(proposed: Choices, given: Given, prompt: Ask) -> Choices:
    """Let a person change what was proposed."""
    format_, options = proposed.format, proposed.options
    while True:
        if given.format is None:
            format_ = str(prompt("Format", default=format_))
        if format_ != proposed.format:
            options = {}
        text = str(prompt("Options of it", default=_as_text(options)))
        try:
            options = _as_options(text)
            check_format(format_, options)
            break
        except MissingLibraryError as error:  # the config may be meant for another machine
            say(str(error))
            break
        except ConfigError as error:
            say(str(error))
    path = given.path or str(prompt("Folder of the cache", default=proposed.path))
    proposed = replace(proposed, format=format_, options=options, path=path)
    if given.max_bytes:
        return proposed
    say(f"  {proposed.bounded[:1].upper()}{proposed.bounded[1:]}.")
    bound = str(prompt("Bound of the cache", default=proposed.max_bytes))
    same = bound == proposed.max_bytes
    return replace(proposed, max_bytes=bound, bounded=proposed.bounded if same else "")


def _as_text(options: Mapping[str, Any]) -> str:
    return str(yaml.safe_dump(dict(options), default_flow_style=True, width=10**6)).strip()


def _as_options(text: str) -> dict[str, Any]:
    try:
        found = yaml.safe_load(text) or {}
    except yaml.YAMLError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"expected options such as {{axis: 0}}, found {text!r}")
    return found


def choices_of(given: Given, look: Look | None) -> Choices:
    """Return what the options say, and for the rest what the look proposes."""
    proposal = look.proposal if look else None
    known = Choices(
        url=given.url or EXAMPLE_URL,
        storage_options=given.storage_options,
        path=given.path or Choices().path,
    )
    if given.format is not None:
        known = replace(known, format=given.format)
    if given.format == "raw":
        known = replace(known, options=RAW_GUESS, seen=[RAW_GUESSED])
    if look and proposal and given.format in (None, proposal.format):
        known = replace(
            known,
            format=proposal.format,
            options=proposal.options,
            seen=[f"Looked at {look.key}.", *proposal.reasons],
        )
    if given.max_bytes:
        return replace(known, max_bytes=given.max_bytes)
    if given.url is None:
        return known
    nbytes = look.nbytes if look and look.all else None
    bound, why = propose_bound(free_bytes(Path(known.path)), nbytes)
    return replace(known, max_bytes=as_size(bound), bounded=why)


def free_bytes(path: Path) -> int:
    """Return the bytes that are free where a folder is, or will be."""
    there = next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())
    return shutil.disk_usage(there).free


def words_of(look: Look) -> str:
    """Return what was seen, in a sentence."""
    more = "" if look.all else " and more"
    samples = look.objects * look.proposal.samples
    about = "" if look.all else "at least "
    return (
        f"Found {plural(look.objects, 'object')}{more}, {in_bytes(look.nbytes)}; "
        f"as proposed, {about}about {in_count(samples)} samples of "
        f"{in_bytes(look.proposal.sample_bytes)}."
    )


def look_with_spinner(given: Given) -> Look:
    """Return what is seen at the source; meanwhile a terminal says so."""
    source = SourceConfig(url=(given.url or "",), storage_options=given.storage_options)
    if not redraws(sys.stderr):
        return look_at(source)
    words = Text(f"looking at {given.url} (at most {SECONDS:g} s) …", no_wrap=True)
    with Console(stderr=True).status(words):
        return look_at(source)


def say(text: str) -> None:
    """Tell the person; the standard output may be the config."""
    typer.echo(folded(text, sys.stderr), err=True)
