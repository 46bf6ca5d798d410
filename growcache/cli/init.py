"""``growcache init``: write a commented config, from options, a probe of the source, and answers.

The text of the config is written by hand rather than generated, because its comments are the point. A
test compares it with the model, so that no key, default or choice is missing.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import typer
import yaml
from rich.console import Console
from rich.text import Text

from growcache.cache.files import FILE_MODE
from growcache.cli.humanize import as_size, in_bytes, in_count, plural
from growcache.cli.source_probe import PROBE_SECONDS, ProbedSource, probe_source, propose_bound
from growcache.cli.terminal import can_redraw, fold_to_width
from growcache.config import SourceConfig
from growcache.config_text import load_config
from growcache.errors import ConfigError, GrowcacheError, MissingLibraryError, StoreError
from growcache.formats import check_format
from growcache.secrecy import url_without_secrets

EXAMPLE_URL = "s3://my-bucket/recordings/**/*.npy"
COMMENT_WIDTH = 88  # of a comment


@dataclass(frozen=True, slots=True)
class ConfigChoices:
    """What is chosen in a config; all else in it is the default.

    Attributes:
        url: of the source.
        format: of the objects.
        options: of the format.
        storage_options: of the store.
        path: of the cache.
        max_bytes: of the cache, as a person writes it.
        seen: sentences about the objects that were looked at.
        bounded: why ``max_bytes`` is what it is.
    """

    url: str = EXAMPLE_URL
    format: str = "npy"
    options: Mapping[str, Any] = field(default_factory=dict)
    storage_options: Mapping[str, Any] = field(default_factory=dict)
    path: str = "./cache"
    max_bytes: str = "10GB"
    seen: Sequence[str] = ()
    bounded: str = ""


CONFIG_TEMPLATE = """\
# growcache configuration. Start the service with:   growcache run {file}
# Every key below but source.url may be left out: its default is written here, or named in
# the comment above it. `--set section.key=value` and GROWCACHE_SECTION__KEY=value override
# this file.

source:
  # Where the objects are: any fsspec URL (s3://, gs://, az://, https://, sftp://, a plain
  # path), with globs (* within a folder, ** across folders); or a list of URLs.
  url: {url}
  # What an object holds (default: npy).
  #   npy, npz: NumPy files      raw: an array without header
  #   hdf5: an HDF5 file         zarr: the chunks of Zarr arrays
  #   parquet: rows of a table   jsonl: lines of JSON
  #   lmdb: an LMDB data file    tfrecord: a TFRecord file
  #   image: a JPEG or PNG       tar: an archive as WebDataset has it
  #   bytes: the object itself, for your own code
  #   "package.module:function": what that function reads
{seen}  format: {format}
  # npy:   {{}}                                 the whole array is one sample
  #        {{axis: 0}}                          one sample per row
  #        {{window: 4096, stride: 1024}}       windows along the first axis
  # raw:   {{dtype: "<f4", shape: [64], window: 4096, stride: 1024}}
  #        shape: of one row; also offset (bytes of a header to skip), channels (a list:
  #        which entries of the row's first axis to keep), edge: drop | pad (what to do with
  #        a shorter last window), phase: random | zero (where the grid of windows starts)
  #        edge and phase are options of npy and npz, too
  # npz:   {{fields: [x, y], axis: 0}}         axis and window as with npy; read: whole for archives
  #        that are compressed
  # hdf5:  {{datasets: [x, g/y], window: 4096}}   paths in the file, of equal length; axis and window
  #        as with npy, edge and phase as with raw
  # zarr:  {{window: 256}}                      or axis: 0; url matches the chunks of one array, and
  #        beside: [labels] takes arrays of equal length along
  # parquet: {{columns: [x, y]}}                without it all; nulls: error | drop (rows with one)
  # lmdb:  {{database: name, key: str}}         which of several; the key as a field (none | str |
  #        bytes); decode: "package.module:function" from data (and key) to a sample
  # image: {{label: folder, classes: [cat, dog]}}
  #        the label is the number of the folder's name in classes, or without them that name;
  #        label: none where it means nothing; decode: true to cache pixels instead of files
  # jsonl: {{fields: [text, label]}}          which keys; without it all, as they are found
  #        {{fields: {{y: int64, x: {{path: meta.x, dtype: float32, default: 0}}}}}}
  #        raw: true (lines as bytes); compression: auto | none | gzip | zlib | zstd
  # tfrecord: {{features: {{x: [float32, 64, 64], y: int64}}}}   of tf.train.Example, which dtype
  #        and shape; decode: example | none | "package.module:function"; index: true walks
  #        through an object to know its records, for such as are TFRecord files themselves
  # tar:   {{fields: [jpg, cls]}}              0001.jpg and 0001.cls are a sample; without it all
  #        decode: extension | images (these as pixels, too) | none (bytes) |
  #        "package.module:function"; index: true for archives in archives; compression as above
  # bytes: {{decode: "package.module:function"}}  from bytes to a sample, before it is cached
  # More of each: docs/formats.md
  options: {options}
  # As in fsspec: key, secret, token, endpoint_url, anon, profile, client_kwargs, ... For
  # S3, what is not given is looked up as boto3 does (environment, ~/.aws, instance role).
  storage_options: {storage_options}
  # auto: obstore for S3, GCS, Azure and HTTP, fsspec for everything else
  # obstore | fsspec: ask for one of the two
  client: auto
  # A table (csv, tsv, jsonl, parquet) whose columns each sample gets by its object's row:
  # {{url: labels.csv, key: path, columns: [subject, state]}}; match: exact | name | stem | a
  # regular expression with (?P<key>...)
  labels: null
  # Instead of url, several objects in one sample: those with the same {{k}} belong together, as in
  # {{x: "s3://b/train_x_{{k}}.npy", y: "s3://b/train_y_{{k}}.npy"}}
  fields: {{}}
  # Objects without a row or partners: error: the service ends and names them | skip: without them
  on_missing: error

# A subset of the objects, by a hash of their group, so that no group is in two of them:
# {{group: "(?P<group>sub-[0-9]+)", fractions: {{train: 0.8, val: 0.2}}, use: train}}
split: null

sampling:
  # With the same source, seed and objects, the same shards are drawn, byte for byte.
  seed: 0
  # permutation: no sample twice before all were drawn | replacement: independent draws
  order: permutation
  # About how many samples one visit to an object yields. More cost fewer requests, but
  # neighbours in one object are alike, and so worth less to training.
  # auto: 1 where objects are read by range, but what a chunk holds where they have chunks;
  # those read whole yield all they hold
  samples_per_object: auto
  # samples: long recordings are visited more often | objects: in turns, all equally often
  weight_by: samples
  # Samples in a full shard (one file of the cache).
  # auto: about 64 MB, or a 64th of cache.max_bytes if that is less
  shard_samples: auto
  # What a sample is: as found (auto), or {{x: [float32, null, 64], note: str}} with null for a
  # dimension that differs between samples.
  schema: auto
  # Objects that are drawn more often than there are of them, for each sample a `_weight`:
  # {{by: label, weights: balanced}}; natural | sqrt | {{cat: 2, dog: 1}}. by: a column of
  # source.labels, a regular expression with (?P<stratum>...), or label with format image
  strata: null
  # "package.module:function", called once for each sample before it is cached, with any of
  # the arguments (sample, rng, origin); returns a dict of arrays, or None to leave the
  # sample out. Random augmentation belongs into the training loop, where it differs from
  # epoch to epoch.
  transform: null
  # Further arguments of the function, or those of a class, made once for each sampler.
  transform_options: {{}}
  # Above this share of samples that cannot be read, the service stops with the reasons.
  max_skipped: 0.01
  # Sampler processes, and reads in flight in each of them.
  workers: 2
  concurrency: 16
  # A read, or a sampler, without progress for so long is given up and tried again.
  timeout_seconds: 60
  # Bytes that one run may fetch ("2TB"), and how many per second ("50MB").
  max_egress: null
  max_bytes_per_second: null
  # This machine's number among `nodes` machines, which then draw different samples.
  node: 0
  nodes: 1

cache:
  # A folder on a local disk, used by nothing else (default: ./cache).
  path: {path}
  # Upper bound of the disk space in use, temporary files and index included (default: 10GB).
{bounded}  max_bytes: {max_bytes}
  # Stop at so many samples: a fixed set, for validation. Needs `eviction: none`.
  max_samples: null
  # tfrecord: shards that TensorFlow reads natively and PyTorch through a memory map
  # npy: a folder of .npy files for each shard, which anything reads that reads NumPy's files
  format: tfrecord
  # What leaves a full cache first:
  # fifo: the oldest | random | most_used | none: the cache fills up and stays
  eviction: fifo
  # No shard leaves before each training job has used it so often (0: at any time).
  min_uses: 1
  # A shard that a job has used so often is left out of the epochs of this job (null: no limit).
  max_reuse: null
  # When nothing else is left: warn: go on with all | wait: for new samples
  on_max_reuse: warn
  # What a reader that died had not read stays protected for so long.
  resume_seconds: 600
  # Space to leave free on the disk, as a share of it or in bytes ("5GB"): below that,
  # samplers wait.
  min_free: 1%
  # Locks and SQLite are not to be trusted on NFS and the like; true: use it all the same.
  allow_network_filesystem: false
"""


def config_text(file: str = "growcache.yaml", choices: ConfigChoices | None = None) -> str:
    """Return the text of a commented config."""
    chosen = choices or ConfigChoices()
    return CONFIG_TEMPLATE.format(
        file=file,
        url=_yaml_scalar(chosen.url),
        seen=_yaml_comment(chosen.seen),
        format=_yaml_scalar(chosen.format),
        options=_yaml_mapping(chosen.options),
        storage_options=_yaml_mapping(chosen.storage_options),
        path=_yaml_scalar(chosen.path),
        bounded=_yaml_comment([f"Chosen: {chosen.bounded}."] if chosen.bounded else []),
        max_bytes=chosen.max_bytes,
    )


def _yaml_comment(sentences: Sequence[str]) -> str:
    """Return sentences as comments within a section."""
    return "".join(
        f"{line}\n"
        for sentence in sentences
        for line in textwrap.wrap(
            sentence.translate(_UNPRINTABLE),
            COMMENT_WIDTH,
            initial_indent="  # > ",
            subsequent_indent="  #   ",
        )
    )


# What YAML refuses even in a comment; it may stand in a key, or at the start of an object.
_UNPRINTABLE = dict.fromkeys(
    (*range(32), *range(127, 160), 8232, 8233, 65279), "?"
) | dict.fromkeys(range(55296, 57344), "?")


def _yaml_scalar(text: str) -> str:
    """Return a text as YAML has it: as it is where nothing in it has a meaning there."""
    simple = text.replace("/", "").replace(".", "").replace("-", "").replace("_", "")
    if (
        simple.isascii()
        and simple.isalpha()
        and text[0] not in "-"
        and simple.lower() not in _YAML_KEYWORDS
    ):
        return text
    return text if text == EXAMPLE_URL else json.dumps(text, ensure_ascii=False)


_YAML_KEYWORDS = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}


def _yaml_mapping(values: Mapping[str, Any]) -> str:
    """Return a mapping as YAML has it on one line."""
    inner = (f"{_yaml_scalar(key)}: {_yaml_value(value)}" for key, value in values.items())
    return "{" + ", ".join(inner) + "}"


def _yaml_value(value: Any) -> str:
    if isinstance(value, str):
        return _yaml_scalar(value)
    return (
        _yaml_mapping(value)
        if isinstance(value, Mapping)
        else json.dumps(value, ensure_ascii=False)
    )


def checked_config_text(file: str, choices: ConfigChoices) -> str:
    """Return the text of a commented config that loads.

    Raises:
        ConfigError: a choice that no config may have.
    """
    text = config_text(file, choices)
    load_config(yaml.safe_load(text))
    missing_library(choices)
    return text


def missing_library(choices: ConfigChoices) -> str:
    """Return what has to be installed before the config can be used; empty: nothing.

    Raises:
        ConfigError: a choice that no config may have.
    """
    try:
        check_format(choices.format, choices.options, (choices.url,))
    except MissingLibraryError as error:
        return str(error)
    return ""


def write_config(path: Path, choices: ConfigChoices, *, force: bool = False) -> None:
    """Write a commented config, as a whole or not at all.

    Raises:
        ConfigError: the file exists, or cannot be written, or a choice is none.
    """
    refuse_existing(path, force=force)
    text = checked_config_text(str(path), choices)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.touch(FILE_MODE, exist_ok=False)  # its owner may write secrets into it
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    finally:
        temporary.unlink(missing_ok=True)


def refuse_existing(path: Path, *, force: bool) -> None:
    """Refuse to write over a file.

    Raises:
        ConfigError: it exists.
    """
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; name a file in it")
    if path.exists() and not force:
        raise ConfigError(f"{path} exists; name another file, or add --force")


RAW_GUESS = {"dtype": "<f4", "window": 4096}
RAW_GUESS_REASON = "A guess: set dtype, shape and window to what was recorded."
Prompt = Callable[..., Any]  # typer.prompt, and what tests put in its place


@dataclass(frozen=True, slots=True)
class InitOptions:
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


def choose_without_asking(given: InitOptions) -> ConfigChoices:
    """Return what goes into the config, without a question.

    Raises:
        ConfigError: a URL that no store can have.
        StoreError: the source could not be looked at, and a guess was not asked for.
    """
    look = None
    if given.url and given.look:
        try:
            look = probe_with_spinner(given)
        except StoreError as error:
            said = f"could not look at {url_without_secrets(given.url)}: {error}"
            if not given.force:
                raise StoreError(
                    f"{said}; nothing was written. Mend that, or add --force for a config whose "
                    "format is a guess"
                ) from None
            print_to_stderr(f"{said}; the format is a guess")
    return propose_choices(given, look)


def ask_for_choices(given: InitOptions, prompt: Prompt = typer.prompt) -> ConfigChoices:
    """Return what goes into the config, from answers where the command line says nothing."""
    given, look = _ask_for_source(given, prompt)
    if look is not None:
        print_to_stderr(describe_probe(look))
    proposed = propose_choices(given, look)
    for sentence in proposed.seen:
        print_to_stderr(f"  {sentence}")
    return _ask_for_changes(proposed, given, prompt)


def _ask_for_source(
    given: InitOptions, prompt: Prompt
) -> tuple[InitOptions, ProbedSource | None]:
    """Prompt where the objects are, until something is found there or nobody minds."""
    while True:
        if given.url is None:
            print_to_stderr(
                "Where are the objects? s3://, gs://, az://, https://, a path …, with globs."
            )
            given = replace(given, url=prompt("URL", default=EXAMPLE_URL))
        if given.url == EXAMPLE_URL or not given.look:
            return given, None
        try:
            return given, probe_with_spinner(given)
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
    """Return what is known after an answer to "what else shall be tried?".

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
    """Let a person change what was proposed."""
    format_, options = proposed.format, proposed.options
    while True:
        if given.format is None:
            format_ = str(prompt("Format", default=format_))
        if format_ != proposed.format:
            options = {}
        text = str(prompt("Options of it", default=_options_to_text(options)))
        try:
            options = _options_from_text(text)
            check_format(format_, options)
            break
        except MissingLibraryError as error:  # the config may be meant for another machine
            print_to_stderr(str(error))
            break
        except ConfigError as error:
            print_to_stderr(str(error))
    path = given.path or str(prompt("Folder of the cache", default=proposed.path))
    proposed = replace(proposed, format=format_, options=options, path=path)
    if given.max_bytes:
        return proposed
    print_to_stderr(f"  {proposed.bounded[:1].upper()}{proposed.bounded[1:]}.")
    bound = str(prompt("Bound of the cache", default=proposed.max_bytes))
    same = bound == proposed.max_bytes
    return replace(proposed, max_bytes=bound, bounded=proposed.bounded if same else "")


def _options_to_text(options: Mapping[str, Any]) -> str:
    return str(yaml.safe_dump(dict(options), default_flow_style=True, width=10**6)).strip()


def _options_from_text(text: str) -> dict[str, Any]:
    try:
        found = yaml.safe_load(text) or {}
    except yaml.YAMLError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"expected options such as {{axis: 0}}, found {text!r}")
    return found


def propose_choices(given: InitOptions, look: ProbedSource | None) -> ConfigChoices:
    """Return what the options say, and for the rest what the look proposes."""
    proposal = look.proposal if look else None
    known = ConfigChoices(
        url=given.url or EXAMPLE_URL,
        storage_options=given.storage_options,
        path=given.path or ConfigChoices().path,
    )
    if given.format is not None:
        known = replace(known, format=given.format)
    if given.format == "raw":
        known = replace(known, options=RAW_GUESS, seen=[RAW_GUESS_REASON])
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
    bound, why = propose_bound(free_disk_bytes(Path(known.path)), nbytes)
    return replace(known, max_bytes=as_size(bound), bounded=why)


def free_disk_bytes(path: Path) -> int:
    """Return the bytes that are free where a folder is, or will be."""
    there = next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())
    return shutil.disk_usage(there).free


def describe_probe(look: ProbedSource) -> str:
    """Return what was seen, in a sentence."""
    more = "" if look.all else " and more"
    samples = look.objects * look.proposal.samples
    about = "" if look.all else "at least "
    return (
        f"Found {plural(look.objects, 'object')}{more}, {in_bytes(look.nbytes)}; "
        f"as proposed, {about}about {in_count(samples)} samples of "
        f"{in_bytes(look.proposal.sample_bytes)}."
    )


def probe_with_spinner(given: InitOptions) -> ProbedSource:
    """Return what is seen at the source; meanwhile a terminal says so."""
    source = SourceConfig(url=(given.url or "",), storage_options=given.storage_options)
    if not can_redraw(sys.stderr):
        return probe_source(source)
    words = Text(f"looking at {given.url} (at most {PROBE_SECONDS:g} s) …", no_wrap=True)
    with Console(stderr=True).status(words):
        return probe_source(source)


def print_to_stderr(text: str) -> None:
    """Tell the person; the standard output may be the config."""
    typer.echo(fold_to_width(text, sys.stderr), err=True)
