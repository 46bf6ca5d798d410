r"""Train on recordings with classes from a table, and draw all classes equally often.

    python examples/labels_table.py --url 's3://bucket/recordings/**/*.npy' --window 1024 \
        --table s3://bucket/recordings.csv --key path --column state

Each row of the table belongs to an object, which the column --key names. The column --column becomes
a field of each sample of that object. The samples are windows, fetched one by one. All classes are
drawn equally often. `_weight` is the factor that restores a class's original share.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import growcache
from growcache.torch import EpochLoader


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on recordings with a table of labels.")
    parser.add_argument("--url", required=True, help="arrays [time, channels], with globs")
    parser.add_argument("--table", required=True, help="a .csv, .tsv, .jsonl or .parquet")
    parser.add_argument("--key", default="path", help="the column that names objects")
    parser.add_argument("--column", default="label", help="the column of classes")
    parser.add_argument("--window", type=int, default=1024, help="time steps per sample")
    parser.add_argument("--cache", default="cache", help="a folder on a local disk")
    parser.add_argument("--max-bytes", default="10GB", help="the upper bound of its size")
    parser.add_argument("--min-samples", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=10)
    arguments = parser.parse_args()

    table = {
        "url": arguments.table,
        "key": arguments.key,
        "columns": [arguments.column],
        "classes": {arguments.column: "auto"},  # class numbers instead of names
    }
    config = {
        "source": {
            "url": arguments.url,
            "format": "npy",
            "options": {"window": arguments.window},
            "labels": table,
        },
        "sampling": {"strata": {"by": arguments.column, "weights": "balanced"}},
        "cache": {"path": arguments.cache, "max_bytes": arguments.max_bytes},
    }

    with (
        growcache.serve(config),  # draws samples in the background until this block ends
        EpochLoader(
            arguments.cache,
            batch_size=arguments.batch_size,
            min_samples=arguments.min_samples,
        ) as loader,
    ):
        classes = loader.classes[arguments.column]
        model = nn.Sequential(
            nn.LazyConv1d(16, kernel_size=9, stride=4),
            nn.ReLU(),
            nn.AdaptiveAvgPool1d(1),
            nn.Flatten(),
            nn.Linear(16, len(classes)),
        )
        print(f"classes: {', '.join(classes)}")
        optimizer = None
        for epoch in range(arguments.epochs):
            right, all_of_them = 0.0, 0.0
            for batch in loader:  # x [batch, window, channels], class numbers, and weights
                y = batch[arguments.column]
                logits = model(batch["x"].float().transpose(1, 2))
                loss = nn.functional.cross_entropy(logits, y)
                optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=1e-2)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                right += float(((logits.argmax(1) == y) * batch["_weight"]).sum())
                all_of_them += float(batch["_weight"].sum())
            accuracy = 100 * right / all_of_them  # at the original shares of the classes
            print(f"epoch {epoch}: accuracy {accuracy:.0f} %; {loader.report}")


if __name__ == "__main__":
    main()
