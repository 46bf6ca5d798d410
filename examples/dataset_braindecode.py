"""Train on EEG windows that braindecode cuts, through a growing cache.

    python examples/dataset_braindecode.py --folder /mnt/slow/eeg --classes healthy ill

MNE opens the recordings without reading their signals. growcache reads each window once, in
separate processes. Training takes the windows from the cache, and each epoch has more of them.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Any

import mne
import torch
from braindecode.datasets import BaseConcatDataset, RawDataset
from braindecode.preprocessing import create_fixed_length_windows
from torch import nn

from growcache.torch import EpochLoader


def make(folder: str, classes: list[str], window: int) -> Any:
    """Return windows of the recordings. Each class has a folder."""
    recordings = [
        RawDataset(
            mne.io.read_raw_fif(path, preload=False, verbose="error"),
            {"label": label},
            target_name="label",
        )
        for label, name in enumerate(classes)
        for path in sorted(Path(folder, name).glob("*_raw.fif"))
    ]
    return create_fixed_length_windows(
        BaseConcatDataset(recordings),
        window_size_samples=window,
        window_stride_samples=window,
        drop_last_window=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on windows that braindecode cuts.")
    parser.add_argument("--folder", required=True, help="a folder of folders of _raw.fif files")
    parser.add_argument("--classes", nargs="+", required=True, help="names of folders")
    parser.add_argument("--window", type=int, default=256, help="values per channel")
    parser.add_argument("--cache", default="cache", help="a folder on a local disk")
    parser.add_argument("--max-bytes", default="1GB", help="the upper bound of its size")
    parser.add_argument("--min-samples", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=10)
    arguments = parser.parse_args()

    model = nn.Sequential(
        nn.LazyBatchNorm1d(affine=False),  # because the signals are in volts, which are tiny
        nn.LazyConv1d(16, kernel_size=9, stride=4),
        nn.ReLU(),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(16, len(arguments.classes)),
    )
    with EpochLoader.from_dataset(  # runs the service in a child process until this block ends
        functools.partial(make, arguments.folder, arguments.classes, arguments.window),
        arguments.cache,
        max_bytes=arguments.max_bytes,
        names=["x", "y", "window"],  # window: its number in the recording, start and stop
        batch_size=arguments.batch_size,
        min_samples=arguments.min_samples,
        as_tuple=("x", "y"),
    ) as loader:
        optimizer = None
        for epoch in range(arguments.epochs):
            right = 0
            for x, y in loader:  # [batch, channels, window] and [batch]
                logits = model(x)
                loss = nn.functional.cross_entropy(logits, y)
                optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=1e-2)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                right += int((logits.argmax(1) == y).sum())
            accuracy = right / max(1, loader.report.samples)
            print(f"epoch {epoch}: accuracy {accuracy:.0%}; {loader.report}")


if __name__ == "__main__":
    main()
