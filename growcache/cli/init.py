"""``growcache init``: write a commented config from options, a probe of the source, and answers."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from growcache.cli.init_choices import EXAMPLE_URL, ConfigChoices, InitOptions, propose_choices
from growcache.cli.init_questions import ask_for_choices, found_text, probe_with_spinner
from growcache.cli.init_text import (
    as_yaml,
    checked_config_text,
    refuse_existing,
    write_config,
)
from growcache.cli.terminal import can_ask, fold_to_width, print_to_stderr
from growcache.errors import StoreError
from growcache.secrecy import url_without_secrets

__all__ = ["InitOptions", "init_config"]


def init_config(file: Path, given: InitOptions, *, yes: bool) -> None:
    """Write a config, or print it if the file is ``-``."""
    shown = str(file) == "-"
    if not shown:
        refuse_existing(file, force=given.force)
    asks = can_ask() and not (yes or shown)
    choices = ask_for_choices(given) if asks else choose_without_asking(given)
    if shown:
        typer.echo(checked_config_text("growcache.yaml", choices), nl=False)
        return
    write_config(file, choices, force=given.force)
    edit = "set source.url in it, then " if choices.url == EXAMPLE_URL else ""
    written = f"Wrote {file}; {edit}start the service: growcache run {file}"
    typer.echo(fold_to_width(written, sys.stdout))


def choose_without_asking(given: InitOptions) -> ConfigChoices:
    found = None
    if given.url and given.probe:
        try:
            found = probe_with_spinner(given)
        except StoreError as error:
            failure = f"could not look at {url_without_secrets(given.url)}: {error}"
            if not given.force:
                raise StoreError(
                    f"{failure}; nothing was written. Correct this, or add --force to write a "
                    "config with a guessed format"
                ) from None
            print_to_stderr(f"{failure}; the format is a guess")
    proposed = propose_choices(given, found)
    if found is not None:
        taken = f"{proposed.format}, {as_yaml(dict(proposed.options))}"
        print_to_stderr(
            " ".join(filter(None, (found_text(found), f"Proposed: {taken}.", proposed.rate)))
        )
    return proposed
