"""What lies beside exported shards, for whoever reads them without growcache."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from growcache import __version__
from growcache.cache.identity import read_identity
from growcache.cache.index import ShardRow
from growcache.loading.snapshot import Snapshot
from growcache.schema import Field, Schema
from growcache.service.words import plural
from growcache.usercode import printable

README = """\
# {samples} of a growcache cache

{schema}

Taken from `{source}`: {samples} in {shards} under `shards/`, in the format {format}. The
`.json` beside each shard says which object each sample came from, and what range of it.
`manifest.json` lists the files. The programs below run in this folder.

{reading}
With growcache it is a complete cache of its own, which nothing fills or empties:

```python
from growcache.torch import EpochLoader

loader = EpochLoader(".", batch_size=256, fixed=True)
for batch in loader:
    print({{name: len(values) for name, values in batch.items()}})
loader.close()
```
"""

TFRECORD = """\
```python
from pathlib import Path

import tensorflow as tf

files = sorted(str(path) for path in Path("shards").glob("*.tfrecord"))
features = {{
{features}
}}


def decode(record):
    found = tf.io.parse_single_example(record, features)
    return {{
{fields}
    }}


dataset = tf.data.TFRecordDataset(files).map(decode)
```
"""

NPY = """\
```python
from pathlib import Path

import numpy as np

for folder in sorted(Path("shards").glob("*.npy")):
    arrays = {{path.stem: np.load(path, mmap_mode="r") for path in folder.glob("*.npy")}}
```

{ragged}"""

RAGGED = """\
Of an array whose samples differ in size, `NAME.npy` holds all values one after another, and
sample `i` is `NAME[NAME.offsets[i]:NAME.offsets[i + 1]]` (`NAME.shapes` has the shapes, where
one dimension does not tell them). Text and bytes are stored as `uint8`.
"""


def write_notes(
    folder: Path, snapshot: Snapshot, rows: Sequence[ShardRow], cache_format: str
) -> None:
    """Write ``manifest.json`` and ``README.md`` into the folder of an export."""
    (folder / "manifest.json").write_bytes(_manifest(folder, snapshot, rows, cache_format))
    (folder / "README.md").write_text(
        _readme(folder, snapshot, rows, cache_format), encoding="utf-8"
    )


def _manifest(
    folder: Path, snapshot: Snapshot, rows: Sequence[ShardRow], cache_format: str
) -> bytes:
    shards = [
        {
            "number": row.number,
            "samples": row.samples,
            "files": {
                str(path.relative_to(folder)): path.stat().st_size
                for path in sorted(folder.glob(f"shards/{row.number:08d}*/*"))
                + sorted(folder.glob(f"shards/{row.number:08d}.*"))
                if path.is_file()
            },
        }
        for row in rows
    ]
    value = {
        "growcache": __version__,
        "format": cache_format,
        "schema": snapshot.schema.to_json(),
        "samples": sum(row.samples for row in rows),
        "source": _source(folder),
        "shards": shards,
    }
    return orjson.dumps(value, option=orjson.OPT_INDENT_2)


def _readme(
    folder: Path, snapshot: Snapshot, rows: Sequence[ShardRow], cache_format: str
) -> str:
    tfrecord = cache_format == "tfrecord"
    return README.format(
        samples=plural(sum(row.samples for row in rows), "sample"),
        shards=plural(len(rows), "shard"),
        schema="\n".join(f"- `{printable(str(f))}`" for f in snapshot.schema.fields),
        source=", ".join(_source(folder)),
        format=cache_format,
        reading=tfrecord_code(snapshot.schema) if tfrecord else npy_code(snapshot.schema),
    )


def _source(folder: Path) -> list[Any]:
    identity = read_identity(folder)
    if identity is None:
        return []
    found: list[Any] = []
    for name, value in identity.parts.items():  # of one source, or of several by their numbers
        if name.startswith("source.") and name.endswith(".fields"):
            found += [url for _, url, *_ in value]
        elif name.startswith("source.") and name.endswith(".url"):
            found += value
    return found


def tfrecord_code(schema: Schema) -> str:
    """Return the program that reads the shards with TensorFlow."""
    features = [
        f"    {_quoted(field.name)}: tf.io.FixedLenFeature([], tf.string),"
        for field in schema.fields
    ]
    fields = [f"        {_quoted(field.name)}: {_decoded(field)}," for field in schema.fields]
    return TFRECORD.format(features="\n".join(features), fields="\n".join(fields))


def _quoted(name: str) -> str:
    """Return a name as the programs have it: text, whatever is in it, that nobody may run."""
    return json.dumps(name)


def _decoded(field: Field) -> str:
    found = f"found[{_quoted(field.name)}]"
    if field.dtype in ("bytes", "str"):
        return found
    name = np.dtype(field.dtype).name
    if name == "bool":
        flat = f"tf.cast(tf.io.decode_raw({found}, tf.uint8), tf.bool)"
    else:
        flat = f"tf.io.decode_raw({found}, tf.{name})"
    open_ = sum(size is None for size in field.shape)
    if open_ > 1:
        return flat  # its shape is in the feature "NAME/shape"
    shape = [-1 if size is None else size for size in field.shape]
    return f"tf.reshape({flat}, {shape})"


def npy_code(schema: Schema) -> str:
    """Return the program that reads the shards with NumPy."""
    return NPY.format(ragged=RAGGED + "\n" if schema.is_ragged else "")
