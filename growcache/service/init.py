"""The commented config that ``growcache init`` writes.

It is one text rather than generated, because its comments are the point; a test holds
it against the model, so that no key, default or choice can go missing.
"""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from growcache.cache.files import FILE_MODE
from growcache.config import load_config
from growcache.errors import ConfigError, MissingLibraryError
from growcache.remote.formats import check_format

EXAMPLE_URL = "s3://my-bucket/recordings/**/*.npy"
WIDTH = 88  # of a comment


@dataclass(frozen=True, slots=True)
class Choices:
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


TEMPLATE = """\
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


def config_text(file: str = "growcache.yaml", choices: Choices | None = None) -> str:
    """Return the text of a commented config."""
    chosen = choices or Choices()
    return TEMPLATE.format(
        file=file,
        url=_plain(chosen.url),
        seen=_comment(chosen.seen),
        format=_plain(chosen.format),
        options=_flow(chosen.options),
        storage_options=_flow(chosen.storage_options),
        path=_plain(chosen.path),
        bounded=_comment([f"Chosen: {chosen.bounded}."] if chosen.bounded else []),
        max_bytes=chosen.max_bytes,
    )


def _comment(sentences: Sequence[str]) -> str:
    """Return sentences as comments within a section."""
    return "".join(
        f"{line}\n"
        for sentence in sentences
        for line in textwrap.wrap(
            sentence.translate(_UNPRINTABLE),
            WIDTH,
            initial_indent="  # > ",
            subsequent_indent="  #   ",
        )
    )


# What YAML refuses even in a comment; it may stand in a key, or at the start of an object.
_UNPRINTABLE = dict.fromkeys(
    (*range(32), *range(127, 160), 8232, 8233, 65279), "?"
) | dict.fromkeys(range(55296, 57344), "?")


def _plain(text: str) -> str:
    """Return a text as YAML has it: as it is where nothing in it has a meaning there."""
    simple = text.replace("/", "").replace(".", "").replace("-", "").replace("_", "")
    if (
        simple.isascii()
        and simple.isalpha()
        and text[0] not in "-"
        and simple.lower() not in _WORDS
    ):
        return text
    return text if text == EXAMPLE_URL else json.dumps(text, ensure_ascii=False)


_WORDS = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}


def _flow(values: Mapping[str, Any]) -> str:
    """Return a mapping as YAML has it on one line."""
    inner = (f"{_plain(key)}: {_value(value)}" for key, value in values.items())
    return "{" + ", ".join(inner) + "}"


def _value(value: Any) -> str:
    if isinstance(value, str):
        return _plain(value)
    return _flow(value) if isinstance(value, Mapping) else json.dumps(value, ensure_ascii=False)


def checked_text(file: str, choices: Choices) -> str:
    """Return the text of a commented config that loads.

    Raises:
        ConfigError: a choice that no config may have.
    """
    text = config_text(file, choices)
    load_config(yaml.safe_load(text))
    missing_library(choices)
    return text


def missing_library(choices: Choices) -> str:
    """Return what has to be installed before the config can be used; empty: nothing.

    Raises:
        ConfigError: a choice that no config may have.
    """
    try:
        check_format(choices.format, choices.options, (choices.url,))
    except MissingLibraryError as error:
        return str(error)
    return ""


def write_config(path: Path, choices: Choices, *, force: bool = False) -> None:
    """Write a commented config, as a whole or not at all.

    Raises:
        ConfigError: the file exists, or cannot be written, or a choice is none.
    """
    refuse_existing(path, force=force)
    text = checked_text(str(path), choices)
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
