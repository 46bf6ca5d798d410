"""Containers that want to run code, to write elsewhere, or to be believed: through a service.

What a parser makes of such bytes is tried by `tests/fuzz`. Here the same inputs, and names that
lead out of a folder, go the whole way: listed, looked at, drawn, cached, checked and shown.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from growcache.cache.check import check
from growcache.cli.cli import main
from tests.formats.lmdb_built import Nodes, leaf, meta, tree
from tests.formats.test_tar import archive
from tests.formats.test_tfrecord import example, file
from tests.sampling.services import write_config
from tests.security.test_hostile_objects import (
    UNPRINTABLE,
    Payload,
    complaints,
    holes_of,
    marked,
    watched,
)

pytestmark = [pytest.mark.filterwarnings("ignore")]

CORPUS = Path(__file__).parent.parent / "fuzz" / "corpus"
GOOD = 20  # objects, so that they say what a sample is
OUT = "../../EVIL\x1b[31m"  # a name that leads out of a folder, and paints
Objects = dict[str, bytes]


def corpus(name: str) -> Objects:
    """What was found by fuzzing; the first byte says what a target is to ask of the rest."""
    return {f"found-{path.name}": path.read_bytes()[1:] for path in (CORPUS / name).iterdir()}


def tars() -> tuple[Objects, Objects]:
    good = {
        f"{n}": archive([(f"{n}.cls", b"%d" % n), (f"{n}.npy", array(n))]) for n in range(GOOD)
    }
    pickled = io.BytesIO()
    np.save(pickled, np.array([Payload()], object), allow_pickle=True)
    bad = {
        "names": archive([(f"{OUT}.cls", b"1"), (f"{OUT}.npy", array(1))]),
        "absolute": archive([("/tmp/EVIL.cls", b"1"), ("/tmp/EVIL.npy", array(1))]),
        "pickle": archive([("0.cls", b"1"), ("0.npy", pickled.getvalue())]),
    }
    return good, bad | corpus("tar")


def lmdbs() -> tuple[Objects, Objects]:
    good = {f"{n}": lmdb([(0, b"a", b"%40d" % n), (0, b"b", b"x" * 40)]) for n in range(GOOD)}
    bad = {"names": lmdb([(0, OUT.encode(), b"v" * 40), (0, b"/tmp/EVIL", b"w" * 40)])}
    return good, bad | corpus("lmdb_values")


def npzs() -> tuple[Objects, Objects]:
    bad = {
        "pickle": archived(x=np.array([Payload()], object)),
        "names": archived(**{OUT: np.ones(4)}),
    }
    return {f"{n}": archived(x=np.full(4, n)) for n in range(GOOD)}, bad | corpus("npz_arrays")


def tfrecords() -> tuple[Objects, Objects]:
    good = {f"{n}": file([example({"x": [1.0, 2.0, float(n)]})] * 3) for n in range(GOOD)}
    bad = {"names": file([example({OUT: [1.0], "x": [1.0, 2.0, 3.0]})])}
    return good, bad | corpus("tfrecord")


def parquets() -> tuple[Objects, Objects]:
    pytest.importorskip("pyarrow")
    good = {f"{n}": table(x=[n, n, n]) for n in range(GOOD)}
    return good, {"names": table(**{OUT: ["EVIL"]})} | corpus("parquet")


def hdf5s() -> tuple[Objects, Objects]:
    h5py = pytest.importorskip("h5py")
    link, named = io.BytesIO(), io.BytesIO()
    with h5py.File(link, "w") as opened:
        opened["x"] = h5py.ExternalLink("/tmp/EVIL.h5", "/x")
    with h5py.File(named, "w") as opened:
        opened[OUT.replace("/", "|")] = np.ones(4)
    good = {}
    for n in range(GOOD):
        with h5py.File(made := io.BytesIO(), "w") as opened:
            opened["x"] = np.full(4, float(n))
        good[f"{n}"] = made.getvalue()
    return good, {"link": link.getvalue(), "names": named.getvalue()} | corpus("hdf5")


def zarrs() -> tuple[Objects, Objects]:
    """Return each input's metadata with one chunk, and a good array of as many chunks."""
    pytest.importorskip("numcodecs")
    text = (
        '{"zarr_format": 2, "shape": [20, 4], "chunks": [1, 4], "dtype": "<f4", "order": "C", '
        '"fill_value": 0, "compressor": null, "filters": null}'
    )
    good = {f"{n}.0": np.full(4, n, "<f4").tobytes() for n in range(GOOD)}
    bad: Objects = {}
    for path in (CORPUS / "zarr").iterdir():
        metadata, _, chunk = path.read_bytes().partition(b"\0\0")
        key, name = (
            ("c/0/0", "zarr.json") if b'zarr_format": 3' in metadata else ("0.0", ".zarray")
        )
        bad |= {
            f"{path.name}.zarr/x/{name}": metadata,
            f"{path.name}.zarr/x/{key}": chunk + b"\0",
        }
    return {
        "x/.zarray": text.encode(),
        **{f"x/{name}": data for name, data in good.items()},
    }, bad


def lmdb(nodes: Nodes) -> bytes:
    size, empty = 512, tree((1 << 64) - 1, 0, 0)
    pages = [meta(0, size, tree(2, 1, len(nodes))), meta(1, size, empty, 0)]
    return b"".join([*pages, leaf(2, size, nodes)])


def array(n: int) -> bytes:
    made = io.BytesIO()
    np.save(made, np.full(4, n, "<f4"))
    return made.getvalue()


def archived(**arrays: Any) -> bytes:
    made = io.BytesIO()
    np.savez(made, **arrays)
    return made.getvalue()


def table(**columns: Any) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    made = io.BytesIO()
    pq.write_table(pa.table(columns), made)
    return made.getvalue()


FAMILIES: dict[str, tuple[Callable[[], tuple[Objects, Objects]], dict[str, Any]]] = {
    "hdf5": (hdf5s, {}),
    "lmdb": (lmdbs, {"key": "str"}),
    "npz": (npzs, {}),
    "parquet": (parquets, {}),
    "tar": (tars, {}),
    "tfrecord": (tfrecords, {}),
    "zarr": (zarrs, {"axis": 0}),
}


SLOW = {"npz", "parquet", "tfrecord"}  # their parsers are as everyday, in tests/fuzz


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in FAMILIES],
)
def test_containers(short_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    make, options = FAMILIES[name]
    good, bad = make()
    for folder, objects in (("0-good", good), ("1-bad", bad)):
        for key, data in objects.items():
            path = short_path / "data" / folder / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    config = write_config(
        short_path / "c.yaml",
        f"{short_path}/data/**",
        source={"format": name, "options": options},
        sampling={"max_skipped": 0.99, "timeout_seconds": 60},
    )
    code, said = watched(short_path, "run", str(config), "--until-full")
    assert code == 0, said
    # A library asks, when it is imported, what machine this is.
    assert [one for one in complaints(short_path) if "['uname', '-p']" not in one] == []
    assert marked(short_path) == set()
    holes = holes_of(short_path / "c")
    assert holes
    assert {key: why for key, why in holes.items() if "/0-good/" in key} == {}
    assert [found for found in check(short_path / "c") if found.severity == "error"] == []
    assert main(["peek", str(short_path / "c")]) == 0
    said += capsys.readouterr().out
    assert UNPRINTABLE.findall(said + "".join(holes.values())) == []
