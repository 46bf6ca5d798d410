"""Manifests in place of a listing: tables of keys and sizes, and inventories of S3."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest

from growcache.cache.status import read_status
from growcache.cli.cli import main
from growcache.cli.redraw_sample import refetch_sample
from growcache.config_source import SourceConfig
from growcache.errors import ConfigError, GrowcacheError
from growcache.loading.snapshot import Snapshot
from growcache.sampling.label_table import parse_table
from growcache.store.contract import Entry
from growcache.store.manifest import ManifestListing
from growcache.store.opening import open_store
from tests.sampling.services import run, write_config
from tests.servers import Bucket

ETAG = "0123456789abcdef0123456789abcdef"


def listed(manifest: Any, url: str = "s3://b/rec/**/*.npy", **more: Any) -> list[Entry]:
    options: dict[str, Any] = (
        {"storage_options": {"anon": True}} if url.startswith("s3") else {}
    )
    values = {"url": url, "manifest": manifest, **options, **more}
    source = SourceConfig.model_validate(values)
    listing = ManifestListing(open_store(source, without_credentials=True), 5)
    return [entry for page in listing.pages() for entry in page]


def parquet(path: Path, columns: dict[str, list[Any]]) -> Path:
    pa = pytest.importorskip("pyarrow")
    __import__("pyarrow.parquet").parquet.write_table(pa.table(columns), path)
    return path


ROWS = [{"key": f"rec/{n}.npy", "size": n + 1, "etag": ETAG} for n in range(3)]
WRITERS: dict[str, Callable[[Path], Any]] = {
    "k.csv": lambda path: path.write_text(
        "\ufeffKey,junk,Size,ETag\r\n"
        + "".join(f"rec/{n}.npy,x,{n + 1},{ETAG}\r\n" for n in range(3))
    ),
    "k.csv.gz": lambda path: path.write_bytes(
        gzip.compress(b"path,bytes\n" + b"".join(b"%d.npy,%d\n" % (n, n + 1) for n in range(3)))
    ),
    "k.tsv": lambda path: path.write_text(
        "size\turl\n" + "".join(f"{n + 1}\ts3://b/rec/{n}.npy\n" for n in range(3))
    ),
    "k.jsonl": lambda path: path.write_text("\n".join(map(json.dumps, ROWS))),
    "k.parquet": lambda path: parquet(
        path, {name: [r[name] for r in ROWS] for name in ROWS[0]}
    ),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_table_of_keys_and_sizes(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name)
    found = listed(str(tmp_path / name))
    assert [(entry.key, entry.size) for entry in found] == [
        (f"rec/{n}.npy", n + 1) for n in range(3)
    ]
    etags = {entry.etag for entry in found}
    assert etags == ({None} if name in ("k.csv.gz", "k.tsv") else {f'"{ETAG}"'})


INVENTORY = "Bucket, Key, VersionId, IsLatest, IsDeleteMarker, Size, ETag"


def test_an_inventory_in_csv(tmp_path: Path) -> None:
    """Keys are URL-encoded and whole; old versions, deletions and other folders are left out."""
    rows = [
        f'"b","rec/a%20b%2Bc+d%C3%A9.npy","1","true","false","7","{ETAG}"',
        '"b","rec/old.npy","1","false","false","7",""',
        '"b","rec/gone.npy","1","true","true","",""',
        '"b","other/x.npy","1","true","false","7",""',
        '"b","rec/deep/y.npy","","","","8",""',
    ]
    folder = tmp_path / "config"
    (folder / "data").mkdir(parents=True)
    (folder / "2026-01-01T00-00Z").mkdir()
    (folder / "data" / "u.csv.gz").write_bytes(gzip.compress("\n".join(rows).encode()))
    manifest = folder / "2026-01-01T00-00Z" / "manifest.json"
    file = {"key": "inv/b/config/data/u.csv.gz", "size": 1, "MD5checksum": ""}
    values = {"fileFormat": "CSV", "fileSchema": INVENTORY, "files": [file]}
    manifest.write_text(json.dumps(values))
    found = listed(str(manifest))
    assert [(one.key, one.size) for one in found] == [
        ("rec/a b+c dé.npy", 7),
        ("rec/deep/y.npy", 8),
    ]
    manifest.write_text(json.dumps({**values, "fileFormat": "ORC"}))
    with pytest.raises(ConfigError, match=r"manifest\.json: .*'ORC'; ORC is not read"):
        listed(str(manifest))


def test_an_inventory_in_parquet(tmp_path: Path) -> None:
    columns: dict[str, list[Any]] = {
        "bucket": ["b"] * 3,
        "key": ["rec/a%20.npy", "rec/old.npy", "x.npy"],
        "is_latest": [True, False, True],
        "size": [1, 2, 3],
        "e_tag": [ETAG] * 3,
    }
    (tmp_path / "data").mkdir()
    (tmp_path / "day").mkdir()
    parquet(tmp_path / "data" / "u.parquet", columns)
    values = {
        "fileFormat": "Parquet",
        "fileSchema": "message …",
        "files": [{"key": "u.parquet"}],
    }
    (tmp_path / "day" / "manifest.json").write_text(json.dumps(values))
    found = listed(str(tmp_path / "day" / "manifest.json"))
    assert found == [Entry("rec/a%20.npy", 1, f'"{ETAG}"', None)]


@pytest.mark.parametrize(
    ("name", "text", "more", "words"),
    [
        ("k.csv", "file,n\na,1\n", {}, "no column key, Key, path or url, but 'file', 'n'"),
        ("k.csv", "file,n\na,1\n", {"key": "fil"}, "key: it has no column 'fil'"),
        ("k.csv", "", {}, "no column key"),
        (
            "k.csv",
            "key,size\na.npy,big\n",
            {},
            "a.npy: expected its size in bytes, found 'big'",
        ),
        ("k.csv", "key,size\n,1\n", {}, "a row has no 'key'"),
        ("k.csv", "key,size\n", {}, "it has no rows"),
        ("k.csv", "key,size\ns3://c/a.npy,1\n", {}, "none of its 1 keys is an object that"),
        ("k.csv.gz", "key", {}, "its .gz is damaged"),
        ("k.jsonl", "[1]\n", {}, "line 1: expected an object"),
        ("k.parquet", "PAR0", {}, "expected Parquet"),
        ("k.txt", "a" * (1 << 20) + "b", {}, "lines of at most"),
        ("manifest.json", "{}", {}, "expected the manifest.json of an S3 Inventory"),
    ],
)
def test_what_cannot_be_read(
    tmp_path: Path, name: str, text: str, more: dict[str, str], words: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=f"^source.manifest .*{name}: .*{words}"):
        listed({"url": str(tmp_path / name), **more})


def test_a_name_of_no_known_kind() -> None:
    with pytest.raises(ValueError, match=r"expected a name that ends in \.csv"):
        SourceConfig.model_validate({"url": "x", "manifest": "keys.xlsx"})


def test_a_service_draws_what_the_manifest_names(tmp_path: Path) -> None:
    """With labels and a split; sizes are asked for, and a refresh reads the manifest again."""
    (tmp_path / "data").mkdir()
    for n in range(30):
        np.save(tmp_path / "data" / f"{n:02d}.npy", np.full(4, n, "<f4"))
    keys, table = tmp_path / "keys.txt", tmp_path / "labels.csv"
    keys.write_text("".join(f"{n:02d}.npy\n" for n in range(20)) + "nowhere.npy\n")
    table.write_text("path,s\n" + "".join(f"{n:02d}.npy,{n % 5}\n" for n in range(30)))
    source = {
        "manifest": str(keys),
        "labels": {"url": str(table), "key": "path", "columns": ["s"]},
    }
    split = {"group": {"label": "s"}, "fractions": {"a": 0.5, "b": 0.5}, "use": "a"}
    url = f"{tmp_path}/data/*.npy"
    config = write_config(tmp_path / "c.yaml", url, source=source, split=split)

    def drawn() -> set[int]:
        with Snapshot.take(tmp_path / "c") as snapshot:
            return {int(snapshot[i]["x"][0]) for i in range(len(snapshot))}

    code, errors = run(config, "--until-full")
    assert code == 0
    assert "names objects that do not exist, such as" in errors
    first = drawn()
    assert first <= set(range(20))
    assert len({n % 5 for n in first}) < 5
    with keys.open("a") as file:
        file.writelines(f"{tmp_path}/data/{n:02d}.npy\n" for n in range(20, 30))
    assert run(config, "--until-full", "--refresh")[0] == 0
    assert drawn() == {n for n in range(30) if n % 5 in {m % 5 for m in first}}
    assert read_status(tmp_path / "c").holes == 0
    assert refetch_sample(tmp_path / "c", "0:0", None, json=False) == 0
    other = config.read_text().replace("keys.txt", "others.txt")
    config.write_text(other)
    code, errors = run(config, "--until-full")
    assert (code, "source.manifest" in errors) == (2, True)


@pytest.mark.slow
def test_an_inventory_in_a_bucket(tmp_path: Path, bucket: Bucket) -> None:
    """Its versions are those that the store knows, so an object that was rewritten is a hole."""
    rows = []
    for n in range(20):
        file = io.BytesIO()
        np.save(file, np.full(4, n, "<f4"))
        key = f"rec/a {n}.npy"
        bucket.put(key, file.getvalue())
        size, etag = len(file.getvalue()), hashlib.md5(file.getvalue()).hexdigest()
        rows.append(f'"b","{quote(key)}","{size}","{etag}"\n')
    bucket.put("rec/a 3.npy", bytes(144))
    bucket.put("inv/data/u.csv.gz", gzip.compress("".join(rows).encode()))
    files = [{"key": "inv/data/u.csv.gz"}]
    values = {"fileFormat": "CSV", "fileSchema": "Bucket, Key, Size, ETag", "files": files}
    bucket.put("inv/2026-01-01T00-00Z/manifest.json", json.dumps(values).encode())
    source = {
        "manifest": bucket.url("inv/2026-01-01T00-00Z/manifest.json"),
        "storage_options": bucket.storage_options,
    }
    config = write_config(
        tmp_path / "c.yaml", bucket.url("rec/*"), source=source, sampling={"max_skipped": 1}
    )
    assert run(config, "--until-full")[0] == 0
    found = read_status(tmp_path / "c")
    assert (found.objects, found.samples, found.holes) == (20, 19, 1)
    assert "was rewritten since it was listed" in " ".join(found.last_errors)
    assert main(["purge", str(tmp_path / "c"), "rec/a 7.npy"]) == 0
    # The inventory of another day is the same source.
    bucket.put("inv/2026-01-02T00-00Z/manifest.json", json.dumps(values).encode())
    config.write_text(config.read_text().replace("01-01T", "01-02T"))
    assert run(config, "--until-full", "--refresh")[0] == 0
    with Snapshot.take(tmp_path / "c") as snapshot:
        drawn = {int(snapshot[i]["x"][0]) for i in range(len(snapshot))}
    assert drawn == set(range(20)) - {3, 7}


def test_a_file_has_one_key_and_no_name_leads_out_of_the_folder(tmp_path: Path) -> None:
    for name in ("rec/a.npy", "secret.npy"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    names = ("./a.npy", "a.npy", "x/../a.npy", f"file://{tmp_path}/rec/./a.npy",
             "../secret.npy", f"{tmp_path}/rec/../secret.npy", f"file://{tmp_path}/rec/../secret.npy")  # fmt: skip
    manifest = tmp_path / "m.txt"
    manifest.write_text("\n".join(names))
    found = listed(str(manifest), f"{tmp_path}/rec/**")
    assert {entry.key for entry in found} == {f"{tmp_path}/rec/a.npy"}
    manifest = tmp_path / "m.csv"
    manifest.write_text("key,size\n./a.npy,1\n")
    assert listed(str(manifest))[0].key == "rec/a.npy"


def test_a_text_that_each_row_repeats_is_counted_first(tmp_path: Path) -> None:
    """800 bytes of Parquet took 3 GB."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    one = pa.DictionaryArray.from_arrays(
        pa.array(np.zeros(4000, np.int32)), pa.array(["k" * 50_000])
    )
    pq.write_table(pa.table({"key": one}), tmp_path / "m.parquet", compression="zstd")
    with pytest.raises(ConfigError, match="bytes of text in 4,000 rows, found 200,000,000"):
        listed(str(tmp_path / "m.parquet"))
    data = (tmp_path / "m.parquet").read_bytes()
    with pytest.raises(GrowcacheError, match="bytes of text in 4,000 rows"):
        parse_table(data, "parquet", "key", ())
