"""Kinds of object that no format reads: advice on each, with a function that decodes it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from textwrap import dedent
from typing import Any

from growcache.formats.compressed import unpacked_name

DOCUMENT_BYTES = 1 << 16  # if there are many objects, a text up to this size is one sample
READER = "my_reader"
TEXT_SUFFIXES = (".txt", ".text", ".log", ".csv", ".tsv", ".json", "")
# The first lines of Spark's and BigQuery's JSON Lines, whose names end in .json.
_JSON_LINE = re.compile(rb"\s*\{.*\}[^\S\n]*\n\s*\{")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True, slots=True)
class OtherKind:
    findings: tuple[str, ...]
    format: str = "bytes"
    options: Mapping[str, Any] = field(default_factory=dict)
    reader: str = ""  # source of a function that decodes an object


def reader_advice(library: str) -> str:
    return (
        f"{library} reads it: save the function below as {READER}.py where the service starts, and set "
        f'options: {{decode: "{READER}:read"}}; until then an object\'s bytes are one sample.'
    )


def _reader(body: str) -> str:
    return dedent(body).strip() + "\n"


CSV_READER = _reader("""
    import io
    import numpy

    def read(data):
        table = numpy.genfromtxt(
            io.BytesIO(data), delimiter={delimiter!r}, names=True, encoding="utf-8"
        )
        return {{name: table[name] for name in table.dtype.names}}
""")
JSON_READER = _reader("""
    import json
    import numpy

    def read(data):
        found = json.loads(data)
        return {"x": numpy.asarray(found["x"], "float32"), "label": found["label"]}
""")
TORCH_READER = _reader("""
    import io
    import torch

    def read(data):
        found = torch.load(io.BytesIO(data), weights_only=True)
        return {name: value.numpy() for name, value in found.items()}
""")


def other_kind(key: str, head: bytes, *, many: bool) -> OtherKind | None:
    """Return advice on an object that no format reads, or None for an unknown kind.

    >>> other_kind("a.nc", b"CDF" + bytes([1, 0, 0, 0]), many=False).findings[0]
    'A NetCDF file of version 3: SciPy reads it whole, and all its variables form one sample.'
    """
    for is_it, describe in _KINDS:
        if is_it(key, head):
            return describe(key, head, many)
    return None


def _suffix(key: str) -> str:
    return PurePosixPath(unpacked_name(key)).suffix.lower()


def is_text(head: bytes) -> bool:
    """Whether bytes are lines of UTF-8. The last character may be cut off."""
    if not head or b"\0" in head:
        return False
    try:
        head.decode()
    except UnicodeDecodeError as error:
        return error.start >= len(head) - 3 and error.reason == "unexpected end of data"
    return True


def _mat5(_: str, __: bytes, ___: bool) -> OtherKind:
    found = "A MATLAB file of version 5: scipy.io.loadmat reads it whole, and all its variables form one sample."
    cut = "{variables: [eeg], axis: 1, window: 1000} cuts samples from one."
    better = "Files that are saved with -v7.3 are HDF5, whose windows are read by range."
    return OtherKind((found, cut, better), "growcache.readers:mat")


def _netcdf3(_: str, __: bytes, ___: bool) -> OtherKind:
    found = "A NetCDF file of version 3: SciPy reads it whole, and all its variables form one sample."
    cut = "{variables: [t2m], axis: 0} cuts samples from one; scale: true applies scale_factor."
    better = (
        "nccopy -k nc4 IN.nc OUT.nc makes it version 4, whose windows are read by range "
        "(format hdf5)."
    )
    return OtherKind((found, cut, better), "growcache.readers:netcdf3")


def _table(key: str, head: bytes, _: bool) -> OtherKind:
    delimiter = "\t" if _suffix(key) == ".tsv" else ","
    names = _first_line(head).split(delimiter)
    found = (
        f"A table of text, with the columns {', '.join(names[:8])}{', …' * (len(names) > 8)}."
    )
    labels = (
        "If its rows are labels of other objects, set source.url to those and source.labels to this "
        "table. If its rows are samples, convert it to Parquet: pyarrow.parquet.write_table("
        f'pyarrow.csv.read_csv("{PurePosixPath(key).name}"), "table.parquet").'
    )
    each = f"If each object is one recording, {reader_advice('numpy')}"
    return OtherKind((found, labels, each), reader=CSV_READER.format(delimiter=delimiter))


def _first_line(head: bytes) -> str:
    return head.removeprefix(_BYTE_ORDER_MARK).split(b"\n")[0].decode(errors="replace").strip()


def _json_lines(_: str, __: bytes, ___: bool) -> OtherKind:
    return OtherKind(("Each line is a JSON object, and a sample.",), "jsonl")


def _json(_: str, __: bytes, ___: bool) -> OtherKind:
    found = "A JSON document. growcache does not know which part of it is a sample."
    lines = (
        "Records are best as JSON Lines (one object per line): jq -c '.[]' IN.json > OUT.jsonl."
    )
    each = f"If each object is a sample, {reader_advice('json')}"
    return OtherKind((found, lines, each), reader=JSON_READER)


def _text(_: str, head: bytes, many: bool) -> OtherKind:
    mark = " It begins with a byte order mark, which is left out." * head.startswith(
        _BYTE_ORDER_MARK
    )
    if many and len(head) < DOCUMENT_BYTES:
        return OtherKind(
            ("Each text is a sample, as bytes; format: jsonl with raw: true takes lines.",)
        )
    lines = "Text: each line is a sample, as bytes (raw); format: bytes takes whole objects."
    return OtherKind((lines + mark,), "jsonl", {"raw": True})


def _utf16(_: str, __: bytes, ___: bool) -> OtherKind:
    return OtherKind(
        ("Text in UTF-16, whose lines cannot be read; iconv -f UTF-16 -t UTF-8 converts it.",)
    )


def _pickle(key: str, _: bytes, __: bool) -> OtherKind:
    found = "Python pickles. Reading one runs the code that it names, so growcache does not read them."
    better = "Arrays are best saved as .npy or .npz."
    is_torch = _suffix(key) in (".pt", ".pth")
    advice = (
        reader_advice("torch")
        if is_torch
        else "Your own function (decode) can read them with growcache.unpickle_arrays."
    )
    return OtherKind((found, better, advice), reader=TORCH_READER if is_torch else "")


def _is_text_named(*suffixes: str) -> Callable[[str, bytes], bool]:
    return lambda key, head: _suffix(key) in suffixes and is_text(head)


def _is_pickle(key: str, head: bytes) -> bool:
    named = _suffix(key) in (".pkl", ".pickle", ".pt", ".pth")
    return named and head.startswith((b"\x80", b"PK\x03\x04"))


_KINDS: tuple[
    tuple[Callable[[str, bytes], bool], Callable[[str, bytes, bool], OtherKind]], ...
] = (
    (lambda _, head: head.startswith(b"MATLAB 5.0 MAT-file"), _mat5),
    (lambda _, head: head[:4] in (b"CDF\x01", b"CDF\x02"), _netcdf3),
    (_is_pickle, _pickle),
    (_is_text_named(".csv", ".tsv"), _table),
    (lambda key, head: is_text(head) and bool(_JSON_LINE.match(head)), _json_lines),
    (_is_text_named(".json"), _json),
    (_is_text_named(".txt", ".text", ".log", ""), _text),
    (lambda key, head: _suffix(key) in TEXT_SUFFIXES and head[:2] in _UTF16_MARKS, _utf16),
)
