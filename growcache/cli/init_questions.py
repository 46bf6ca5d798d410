"""Ask at a terminal for the settings of a config, with a probe's findings as defaults."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import typer
import yaml

from growcache.cli.init_choices import EXAMPLE_URL, ConfigChoices, InitOptions, propose_choices
from growcache.cli.init_text import as_yaml
from growcache.cli.propose_options import raw_options
from growcache.cli.prove_candidate import ProbedSource
from growcache.cli.source_probe import PROBE_SECONDS, probe_source
from growcache.cli.terminal import print_to_stderr, spinner
from growcache.config_source import SourceConfig
from growcache.errors import ConfigError, GrowcacheError, MissingLibraryError
from growcache.formats import check_format
from growcache.humanize import in_bytes, in_count, plural

Prompt = Callable[..., Any]  # typer.prompt, or a substitute in tests


def ask_for_choices(given: InitOptions, prompt: Prompt = typer.prompt) -> ConfigChoices:
    given, found = _ask_for_source(given, prompt)
    if found is not None:
        print_to_stderr(found_text(found))
    proposed = propose_choices(given, found)
    for sentence in proposed.findings:
        print_to_stderr(f"  {sentence}")
    chosen = _ask_for_format(proposed, given, found, prompt)
    chosen = _ask_for_labels(chosen, found, prompt)
    chosen = _ask_for_split(chosen, found, prompt)
    return _ask_for_cache(chosen, given, prompt)


def found_text(found: ProbedSource) -> str:
    more, at_least = ("", "") if found.is_whole_listing else (" and more", "at least ")
    listed = f"Found {plural(found.objects, 'object')}{more}, {in_bytes(found.nbytes)}"
    count, size = in_count(found.samples), in_bytes(found.sample_bytes)
    samples = f"; with the proposed options {at_least}about {count} samples of {size}"
    return f"{listed}{samples if found.samples else ''}."


def _ask_for_source(
    given: InitOptions, prompt: Prompt
) -> tuple[InitOptions, ProbedSource | None]:
    while True:
        if given.url is None:
            print_to_stderr(
                "Where are the objects? A folder, a file or a glob: s3://, gs://, az://, https://, a path."
            )
            given = replace(given, url=prompt("URL", default=EXAMPLE_URL))
        if given.url == EXAMPLE_URL or not given.probe:
            return given, None
        try:
            return given, probe_with_spinner(given)
        except GrowcacheError as error:
            print_to_stderr(f"Could not look there: {error}")
        print_to_stderr(
            "Enter another URL, an endpoint such as http://minio:9000, or anon (no "
            "credentials); or press Enter to continue."
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


def _ask_for_format(
    proposed: ConfigChoices, given: InitOptions, found: ProbedSource | None, prompt: Prompt
) -> ConfigChoices:
    form, options = proposed.format, dict(proposed.options)
    while True:
        if given.format is None:
            form = str(prompt("Format", default=form))
        if form != proposed.format:
            options = {}
        options = _ask_for_usual_options(form, options, found, prompt)
        text = str(prompt("Options of the format", default=as_yaml(options)))
        try:
            options = yaml.safe_load(text) or {}
            if not isinstance(options, dict):
                raise ConfigError(
                    f"expected options such as {{axis: 0}}, found {text!r}", code="GC105"
                )
            check_format(form, options)
            break
        except MissingLibraryError:  # the config may be for another machine
            break
        except (yaml.YAMLError, ConfigError) as error:
            options = {}
            print_to_stderr(str(error))
    same = form == proposed.format and options == proposed.options
    rate = proposed.rate if same else ""  # of the proposed samples
    findings = proposed.findings
    if not same and findings:
        was = f"{proposed.format} with {as_yaml(dict(proposed.options))}"
        findings = [f"Set at the terminal. The proposal was {was}:", *findings]
    return replace(proposed, format=form, options=options, rate=rate, findings=findings)


def _ask_for_usual_options(
    form: str, options: Mapping[str, Any], found: ProbedSource | None, prompt: Prompt
) -> dict[str, Any]:
    """Ask for dtype and channels of numbers without a header, and for the length of windows."""
    asked = dict(options)
    if form == "raw":
        dtype = str(prompt("Type of a value", default=options.get("dtype", "<f4")))
        channels = _as_number(prompt("Values per row (channels)", default=1), 1)
        nbytes = found.nbytes // found.objects if found else 1 << 30
        asked = raw_options(dtype, nbytes, channels)
    if isinstance(window := asked.get("window"), int | str):
        along = f"along axis {asked['axis']}" if "axis" in asked else "rows"
        unit = "samples or seconds, as in 2s" if form in ("edf", "audio") else along
        answer = prompt(f"Window of a sample ({unit})", default=window)
        asked["window"] = _as_number(answer, str(answer))
    return asked


def _as_number(answer: object, otherwise: Any) -> Any:
    text = str(answer).strip()
    return int(text) if text.isdigit() else otherwise


def _ask_for_labels(
    chosen: ConfigChoices, found: ProbedSource | None, prompt: Prompt
) -> ConfigChoices:
    if found is None or (labels := found.labels) is None:
        return chosen
    print_to_stderr(f"  {labels.sentence}")
    offered = replace(
        chosen, labels=None, labels_findings=[labels.sentence], labels_offer=labels.settings
    )
    if not _agrees(
        prompt("Use these labels", default="yes" if found.all_have_labels else "no")
    ):
        return offered
    missing = "error" if found.all_have_labels else "skip"
    return replace(offered, labels=labels.settings, labels_offer=None, on_missing=missing)


def _ask_for_split(
    chosen: ConfigChoices, found: ProbedSource | None, prompt: Prompt
) -> ConfigChoices:
    if found is None or (split := found.split) is None:
        return chosen
    print_to_stderr(f"  {split.sentence}")
    if not _agrees(prompt("Hold out a fifth of them for validation", default="no")):
        return chosen
    findings = [split.sentence, split.validation_sentence]
    return replace(chosen, split=split.settings, split_findings=findings, split_offer=None)


def _agrees(answer: object) -> bool:
    return str(answer).strip().lower() in ("y", "yes", "true")


def _ask_for_cache(
    proposed: ConfigChoices, given: InitOptions, prompt: Prompt
) -> ConfigChoices:
    if proposed.rate:
        print_to_stderr(f"  {proposed.rate}")
    path = given.cache_path or str(prompt("Folder of the cache", default=proposed.cache_path))
    chosen = replace(proposed, cache_path=path)
    if given.max_bytes:
        return chosen
    reason = proposed.bound_reason
    print_to_stderr(f"  {reason[:1].upper()}{reason[1:]}.")
    bound = str(prompt("Bound of the cache", default=proposed.max_bytes))
    same = bound == proposed.max_bytes
    return replace(chosen, max_bytes=bound, bound_reason=reason if same else "")


def probe_with_spinner(given: InitOptions) -> ProbedSource:
    source = SourceConfig(url=(given.url or "",), storage_options=given.storage_options)
    with spinner(sys.stderr, f"looking at {given.url} (at most {PROBE_SECONDS:g} s) …"):
        return probe_source(source)
