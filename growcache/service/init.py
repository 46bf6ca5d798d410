"""The commented config that ``growcache init`` writes.

It is one text rather than generated, because its comments are the point; a test holds
it against the model, so that no key, default or choice can go missing.
"""

from __future__ import annotations

import json
from pathlib import Path

from growcache.errors import ConfigError

EXAMPLE_URL = "s3://my-bucket/recordings/**/*.npy"

TEMPLATE = """\
# growcache configuration. Start the service with:   growcache run {file}
# Every value below but the URL is the default, so any line may be left out.
# `--set section.key=value` and GROWCACHE_SECTION__KEY=value override this file.

source:
  # Where the objects are: any fsspec URL (s3://, gs://, az://, https://, sftp://, a plain
  # path), with globs (* within a folder, ** across folders); or a list of URLs.
  url: {url}
  # What an object holds. Both formats read only the bytes that a sample needs.
  #   npy: NumPy files                     raw: headerless arrays
  format: npy
  # npy:  {{}}                                  the whole array is one sample
  #       {{axis: 0}}                           one sample per row
  #       {{window: 4096, stride: 1024}}        windows along the first axis
  # raw:  {{dtype: "<f4", shape: [64], window: 4096, stride: 1024}}
  #       shape: of one row; also offset (bytes of a header to skip), channels (a list:
  #       which entries of the row's first axis to keep), edge: drop | pad (what to do with
  #       a shorter last window), phase: random | zero (where the grid of windows starts)
  options: {{}}
  # As in fsspec: key, secret, token, endpoint_url, anon, profile, client_kwargs, ... For
  # S3, what is not given is looked up as boto3 does (environment, ~/.aws, instance role).
  storage_options: {{}}
  # auto: obstore for S3, GCS, Azure and HTTP, fsspec for everything else
  # obstore | fsspec: ask for one of the two
  client: auto

sampling:
  # With the same source, seed and objects, the same shards are drawn, byte for byte.
  seed: 0
  # permutation: no sample twice before all were drawn | replacement: independent draws
  order: permutation
  # About how many samples one visit to an object yields. More cost fewer requests, but
  # neighbours in one object are alike, and so worth less to training.
  # auto: 1 where objects are read by range
  samples_per_object: auto
  # samples: long recordings are visited more often | objects: all equally often
  weight_by: samples
  # Samples in a full shard (one file of the cache).
  # auto: about 64 MB, or a 64th of cache.max_bytes if that is less
  shard_samples: auto
  # "package.module:function", called once for each sample before it is cached, with any of
  # the arguments (sample, rng, origin); returns a dict of arrays. Random augmentation
  # belongs into the training loop, where it differs from epoch to epoch.
  transform: null
  # Arguments of a transform that is a class; one is made for each sampler.
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
  # A folder on a local disk, used by nothing else.
  path: ./cache
  # Upper bound of the disk space in use, temporary files and index included.
  max_bytes: 10GB
  # Stop at so many samples: a fixed set, for validation. Needs `eviction: none`.
  max_samples: null
  # tfrecord: shards that TensorFlow reads natively and PyTorch through a memory map
  format: tfrecord
  # What leaves a full cache first:
  # fifo: the oldest | random | most_used | none: the cache fills up and stays
  eviction: fifo
  # No shard leaves before each training job has used it so often (0: at any time).
  min_uses: 1
  # A shard used so often is left out of new epochs (null: never) ...
  max_reuse: null
  # ... warn: if nothing else is left, it is used all the same | wait: training waits
  on_max_reuse: warn
  # What a reader that died had not read stays protected for so long.
  resume_seconds: 600
  # Space to leave free on the disk, as a share of it or in bytes ("5GB"): below that,
  # samplers wait.
  min_free: 1%
  # Locks and SQLite are not to be trusted on NFS and the like; true: use it all the same.
  allow_network_filesystem: false
"""


def config_text(file: str = "growcache.yaml", url: str = EXAMPLE_URL) -> str:
    """Return the text of a commented config for ``url``."""
    quoted = url if url == EXAMPLE_URL else json.dumps(url, ensure_ascii=False)
    return TEMPLATE.format(file=file, url=quoted)


def write_config(path: Path, url: str, *, force: bool = False) -> None:
    """Write a commented config.

    Raises:
        ConfigError: the file exists, or cannot be written.
    """
    try:
        with path.open("w" if force else "x", encoding="utf-8") as stream:
            stream.write(config_text(str(path), url))
    except FileExistsError:
        raise ConfigError(f"{path} exists; name another file, or add --force") from None
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
