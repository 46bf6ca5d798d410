"""Lines of JSON, TFRecord files, archives and images, as the usual libraries write them."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.matrix.case import Case, Place, Values

# --- json


def line(i: int) -> dict[str, Any]:
    return {"id": i, "text": f"línea {i}", "x": [i / 8, -i / 3], "ok": i % 2 == 0}


def write_lines(folder: Path, pack: Callable[[bytes], bytes], ending: str) -> None:
    for file in range(2):
        text = "".join(
            json.dumps(line(10 * file + i), ensure_ascii=False) + "\n" for i in range(5)
        )
        (folder / f"{file}.jsonl{ending}").write_bytes(pack(text.encode()))


def read_line(place: Place, unpack: Callable[[bytes], bytes]) -> Values:
    found = json.loads(unpack(place.path.read_bytes())[place.start : place.stop])
    x = np.array(found["x"])
    return {
        "id": np.int64(found["id"]),
        "text": found["text"],
        "x": x,
        "ok": np.bool_(found["ok"]),
    }


def zstd(data: bytes) -> bytes:
    import zstandard

    return zstandard.compress(data)


def unzstd(data: bytes) -> bytes:
    import zstandard

    return zstandard.ZstdDecompressor().decompressobj().decompress(data)


def _lines(
    ending: str, pack: Callable[[bytes], bytes], unpack: Callable[[bytes], bytes], *needs: str
) -> Case:
    return Case(
        "json.dumps",
        f".jsonl{ending}",
        "jsonl",
        partial(write_lines, pack=pack, ending=ending),
        partial(read_line, unpack=unpack),
        10,
        url=f"*.jsonl{ending}",
        needs=needs,
    )


def same(data: bytes) -> bytes:
    return data


def read_some(place: Place) -> Values:
    found = json.loads(place.path.read_bytes()[place.start : place.stop])
    return {"y": np.int32(found["id"]), "first": found["text"].encode()}


JSON = [
    _lines("", same, same),
    _lines(".gz", gzip.compress, gzip.decompress),
    _lines(".zst", zstd, unzstd, "zstandard"),
    Case("json.dumps", ".jsonl", "jsonl", partial(write_lines, pack=same, ending=""), read_some, 10,
         {"fields": {"y": {"path": "id", "dtype": "int32"}, "first": {"path": "text", "dtype": "bytes"}}}),
    Case("json.dumps", ".jsonl", "jsonl", partial(write_lines, pack=same, ending=""),
         lambda place: {"data": place.path.read_bytes()[place.start : place.stop].rstrip(b"\n")}, 10,
         {"raw": True}),
]  # fmt: skip

# --- TensorFlow


def write_examples(folder: Path, compression: str = "") -> None:
    import tensorflow as tf

    for file in range(2):
        path = str(folder / f"{file}.tfrecord")
        with tf.io.TFRecordWriter(path, compression or None) as writer:
            for i in range(5):
                image = tf.train.Feature(bytes_list=tf.train.BytesList(value=[bytes([i] * 12)]))
                label = tf.train.Feature(int64_list=tf.train.Int64List(value=[10 * file + i]))
                score = tf.train.Feature(float_list=tf.train.FloatList(value=[i / 4, 1.5]))
                features = {"image": image, "label": label, "score": score}
                example = tf.train.Example(features=tf.train.Features(feature=features))
                writer.write(example.SerializeToString())


def read_example(place: Place, image: bool, compression: str = "") -> Values:
    """The bytes of a record's frame are its origin."""
    import tensorflow as tf

    data = place.path.read_bytes()
    data = gzip.decompress(data) if compression else data
    framed = place.path.with_suffix(".one")
    framed.write_bytes(data[place.start : place.stop])
    record = next(iter(tf.data.TFRecordDataset(str(framed)))).numpy()
    framed.unlink()
    example = tf.train.Example.FromString(record).features.feature
    pixels = example["image"].bytes_list.value[0]
    return {
        "image": np.frombuffer(pixels, "u1").reshape(3, 4) if image else pixels,
        "label": np.int64(example["label"].int64_list.value[0]),
        "score": np.array(example["score"].float_list.value, "<f4"),
    }


FEATURES = {"image": ["uint8", 3, 4], "label": "int64", "score": ["float32", 2]}
TENSORFLOW = [
    Case("tf.io.TFRecordWriter", "tf.train.Example", "tfrecord", write_examples,
         partial(read_example, image=False), 10, url="*.tfrecord", needs=("tensorflow",)),
    Case("tf.io.TFRecordWriter", "tf.train.Example", "tfrecord", write_examples,
         partial(read_example, image=True), 10, {"features": FEATURES}, url="*.tfrecord", needs=("tensorflow",)),
    Case("tf.io.TFRecordWriter", "tf.train.Example, GZIP", "tfrecord", partial(write_examples, compression="GZIP"),
         partial(read_example, image=True, compression="GZIP"), 10,
         {"features": FEATURES, "compression": "gzip"}, url="*.tfrecord", needs=("tensorflow",)),
]  # fmt: skip

# --- Pillow and tarfile


def picture(i: int) -> Any:
    return ((np.arange(6 * 8 * 3) * (i + 3)) % 251).reshape(6, 8, 3).astype("u1")


def encoded(i: int, kind: str) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(picture(i)).save(file, kind)
    return file.getvalue()


def write_folders(folder: Path, kind: str) -> None:
    for i in range(6):
        path = folder / ("cat" if i % 2 else "dog") / f"{i}.{kind.lower()}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(encoded(i, kind))


def read_picture(place: Place, *, pixels: bool, classes: bool) -> Values:
    from PIL import Image

    label = place.path.parent.name
    image: Any = place.path.read_bytes()
    if pixels:
        with Image.open(place.path) as opened:
            image = np.asarray(opened.convert("RGB"))
    return {
        "image": image,
        "label": np.int64(["cat", "dog"].index(label)) if classes else label,
    }


def _pictures(kind: str, options: Mapping[str, Any]) -> Case:
    read = partial(
        read_picture, pixels=bool(options.get("decode")), classes="classes" in options
    )
    writes = partial(write_folders, kind=kind)
    holds = f"{kind} in a folder for each class"
    return Case("Pillow", holds, "image", writes, read, 6, options, url="**", needs=("PIL",))


def write_tar(folder: Path, mode: str) -> None:
    for file in range(2):
        ending = ".tar.gz" if mode == "w:gz" else ".tar"
        with tarfile.open(folder / f"{file}{ending}", mode) as archive:  # type: ignore[call-overload]
            for i in range(4):
                _add(archive, f"{file}{i}.png", encoded(i, "PNG"))
                _add(archive, f"{file}{i}.cls", str(i % 2).encode())
                _add(archive, f"{file}{i}.json", json.dumps({"i": i}).encode())


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    archive.addfile(info, io.BytesIO(data))


def read_members(place: Place, *, packed: bool) -> Values:
    data = place.path.read_bytes()
    data = gzip.decompress(data) if packed else data
    with tarfile.open(
        fileobj=io.BytesIO(data[place.start : place.stop] + bytes(1024))
    ) as archive:
        found = {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]
    key = next(iter(found)).partition(".")[0]
    return {
        "__key__": key,
        "png": found[f"{key}.png"],
        "cls": np.int64(found[f"{key}.cls"]),
        "json": json.dumps(json.loads(found[f"{key}.json"]), separators=(",", ":")),
    }


ARCHIVES = [
    *(_pictures(kind, options) for kind in ("PNG", "JPEG") for options in ({}, {"classes": ["cat", "dog"], "decode": True})),
    _pictures("WEBP", {}),
    Case("tarfile", ".png, .cls and .json", "tar", partial(write_tar, mode="w"), partial(read_members, packed=False), 8,
         needs=("PIL",)),
    Case("tarfile", ".png, .cls and .json, gzip", "tar", partial(write_tar, mode="w:gz"), partial(read_members, packed=True), 8,
         url="*.tar.gz", needs=("PIL",)),
]  # fmt: skip
CASES = [*JSON, *TENSORFLOW, *ARCHIVES]
