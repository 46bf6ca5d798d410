"""The inputs of a loader, and the client options that loaders share."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

BUCKET = "sources"
KEY, SECRET = "growcache", "growcache-secret"
WINDOW = 4096
BATCH = 64


class Batch(NamedTuple):
    """Windows of bytes, and the number of each one's project."""

    inputs: Tensor
    labels: Tensor


@dataclass(frozen=True, slots=True)
class Place:
    """Where a loader finds its samples and its disk.

    Attributes:
        endpoint: URL of the S3 server behind the link.
        samples: a local .npz of all samples in random order, used where no store is needed.
        table: a local CSV of the raw objects' labels.
        folder: an empty one, for the loader's own files.
        disk_bytes: how many bytes it may keep there; buffers in memory hold as many.
        seed: of the order.
        options: settings of the loader that differ between arms.
    """

    endpoint: str
    samples: Path
    table: Path
    folder: Path
    disk_bytes: int
    seed: int
    options: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return it as an argument of a program."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> Place:
        """Return what `to_json` wrote."""
        given = json.loads(text)
        paths = {name: Path(given[name]) for name in ("samples", "table", "folder")}
        return cls(**{**given, **paths})

    @property
    def boto_options(self) -> dict[str, str]:
        """boto3's arguments."""
        return {
            "endpoint_url": self.endpoint,
            "aws_access_key_id": KEY,
            "aws_secret_access_key": SECRET,
            "region_name": "us-east-1",
        }

    @property
    def environment(self) -> dict[str, str]:
        """The same as variables."""
        return {
            "S3_ENDPOINT_URL": self.endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
        }


def stacked(windows: list[bytes], labels: list[int]) -> Batch:
    """Return a batch of single samples."""
    inputs = np.frombuffer(bytearray(b"".join(windows)), np.uint8).reshape(-1, WINDOW)
    return Batch(torch.from_numpy(inputs), torch.tensor(labels))


def samples_of(path: Path) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Return windows and labels of a file of samples."""
    with np.load(path) as found:
        return found["windows"], found["labels"]
