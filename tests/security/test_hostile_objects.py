"""Objects, keys and names that want to run code, or to write where nothing of ours belongs."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from growcache.cache.sidecar import Sidecar
from growcache.loading.snapshot import Snapshot
from tests.sampling.outcomes import npy
from tests.sampling.services import write_config
from tests.security.watched import MARK
from tests.servers import Bucket

HERE = Path(__file__).parent
KEYS = (
    "../../EVIL.npy", "/EVIL.npy", "a/../../EVIL.npy", "./EVIL.npy", "a//EVIL.npy",
    "\x1b[31mEVIL\x1b[0m.npy", "EVIL\x07\x9b31m.npy", "EVIL\u202egnp.npy",
    "C:\\EVIL.npy", "[red]EVIL[/red].npy", "{EVIL!r}%s%n.npy", "$(touch EVIL).npy",
    "-rf EVIL.npy", "n" * 1000 + "EVIL.npy", "EVIL\u2028.npy",
)  # fmt: skip
NAMES = (
    "../../EVIL",
    "..",
    ".",
    "a/EVIL",
    "/tmp/EVIL",
    "EVIL\n\x1b[31m",
    "EVIL\x00",
    'EVIL": (',
)
UNPRINTABLE = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u202e]")


class Payload:
    """Runs a program where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {shlex.quote(MARK)}",)


def header(text: str) -> bytes:
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode() + bytes(64)


def hostile() -> dict[str, bytes]:
    """Objects by their names."""
    plain = "{'descr': %s, 'fortran_order': False, 'shape': (4,)}\n"
    return {
        "pickle.npy": npy(np.array([Payload()], object), pickled=True),
        "call.npy": header(plain % "__import__('os').system('touch EVIL')"),
        "lambda.npy": header(plain % "(lambda: open('EVIL', 'w'))()"),
        "objects.npy": header(plain % "'|O'"),
        "records.npy": header(plain % "[('EVIL', '<f4', (1000000, 1000000))]"),
        "claims.npy": header(plain.replace("(4,)", "(1000000000000,)") % "'<f4'"),
        "empty.npy": header(plain.replace("(4,)", "(1000000000000, 0)") % "'<f4'"),
        "huge.npy": header(plain.replace("(4,)", f"({10**18}, {10**18}, 0)") % "'<f4'"),
    }


def watched(folder: Path, *words: str, cache: Path | None = None) -> tuple[int, str]:
    """Run growcache with every process watched; return its exit code and all that it said."""
    (folder / "watch").mkdir(exist_ok=True)
    (folder / "watch" / "sitecustomize.py").write_text(
        f"import sys\nsys.path.insert(0, {str(HERE.parent.parent)!r})\n"
        "from tests.security.watched import install\ninstall()\n"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            [str(folder / "watch"), os.environ.get("PYTHONPATH", "")]
        ),
        "PYTHONDONTWRITEBYTECODE": "1",
        "WATCHED_LOG": str(folder / "log"),
        "WATCHED_CACHE": str(cache or folder / "c"),
    }
    ran = subprocess.run(
        [sys.executable, "-m", "growcache", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        timeout=300,
        check=False,
    )
    return ran.returncode, (ran.stdout + ran.stderr).decode()


def complaints(folder: Path) -> list[str]:
    lines = (folder / "log").read_text().splitlines()
    seen = [line for line in lines if line.startswith("watched")]
    assert any("growcache sampler" in line for line in seen)
    assert any("growcache run" in line for line in seen)
    return [line for line in lines if line.startswith("complaint")]


def marked(folder: Path) -> set[str]:
    """Every file of a marked name, in the folder and where hostile names lead to."""
    found = {str(path) for path in folder.rglob(f"*{MARK}*")}
    places = [folder.parent, Path("/"), Path("/tmp"), Path.cwd(), Path.home()]
    return found | {str(path) for place in places for path in place.glob(f"*{MARK}*")}


def test_keys_and_arrays_of_a_bucket(bucket: Bucket, short_path: Path) -> None:
    good = npy(np.arange(8, dtype="<f4"))
    for number in range(12):
        bucket.put(f"good/{number}.npy", good)
    for key in KEYS:
        bucket.put(key, good)
    for name, data in hostile().items():
        bucket.put(name, data)
    config = write_config(
        short_path / "c.yaml",
        bucket.url("**"),
        source={"storage_options": bucket.storage_options},
        sampling={"max_skipped": 0.9},
    )
    try:
        code, said = watched(short_path, "run", str(config), "--until-full")
    finally:
        for key in KEYS:
            bucket.delete(key)  # moto's deletion of many at once does not bear them
    assert code == 0, said
    assert complaints(short_path) == []
    assert marked(short_path) == set()
    with Snapshot.take(short_path / "c") as snapshot:
        drawn = {snapshot.origin(i).key for i in range(len(snapshot))}
    holes = holes_of(short_path / "c")
    assert drawn | holes.keys() >= {key for key in KEYS if not key.startswith("/")}
    assert set(hostile()) <= holes.keys()
    for words in (["check", "c"], ["peek", "c"]):
        code, more = watched(short_path, *words)
        assert code == 0, more
        said += more
    assert UNPRINTABLE.findall(said) == []
    for why in holes.values():
        assert UNPRINTABLE.findall(why) == []


def holes_of(cache: Path) -> dict[str, str]:
    sidecars = [Sidecar.from_bytes(path.read_bytes()) for path in cache.glob("shards/*.json")]
    return {hole.key: hole.reason for sidecar in sidecars for hole in sidecar.holes}


@pytest.mark.slow
@pytest.mark.parametrize(
    "cache_format", ["npy", pytest.param("tfrecord", marks=pytest.mark.slow)]
)
def test_names_of_fields(short_path: Path, cache_format: str) -> None:
    (short_path / "data").mkdir()
    for number in range(6):
        (short_path / "data" / f"{number}.npy").write_bytes(npy(np.arange(4.0)))
    (short_path / "names.json").write_text(json.dumps(NAMES))
    (short_path / "mine.py").write_text(
        "import json\n"
        "NAMES = json.load(open('names.json'))\n"
        "def name(sample):\n"
        "    return dict.fromkeys(NAMES, sample['x'])\n"
    )
    config = write_config(
        short_path / "c.yaml",
        f"{short_path}/data/*.npy",
        sampling={"transform": "mine:name"},
        cache={"format": cache_format},
    )
    code, said = watched(short_path, "run", str(config), "--until-full")
    assert code == 0, said
    assert complaints(short_path) == []
    code, more = watched(short_path, "peek", "c", "--sample", "0:0")
    assert code == 0, more
    assert UNPRINTABLE.findall(said + more) == []
    with Snapshot.take(short_path / "c") as snapshot:
        assert set(snapshot[0]) == set(NAMES)
    assert all(Path(path).is_relative_to(short_path / "c") for path in marked(short_path))
    code, _ = watched(short_path, "export", "c", "copy", cache=short_path)
    assert code == 0
    blocks = re.findall(
        r"```python\n(.*?)```", (short_path / "copy/README.md").read_text(), re.S
    )
    for block in blocks:  # whoever runs them runs what we wrote: names are text in it
        assert MARK not in re.sub(r'"(?:[^"\\\n]|\\.)*"', "", block)
        compile(block, "README.md", "exec")


@pytest.mark.slow
def test_images_and_the_folders_that_label_them(short_path: Path) -> None:
    data = io.BytesIO()
    Image.new("RGB", (8, 6)).save(data, "PNG")
    odd = ["[red]EVIL", "EVIL\x1b[31m\n", "...EVIL", "{EVIL}", "$(touch EVIL)"]
    for folder in odd:
        (short_path / "data" / folder).mkdir(parents=True)
        (short_path / "data" / folder / "a.png").write_bytes(data.getvalue())
    config = write_config(
        short_path / "c.yaml",
        f"{short_path}/data/*/*.png",
        source={"format": "image", "options": {"decode": True}},
    )
    code, said = watched(short_path, "run", str(config), "--until-full")
    assert code == 0, said
    code, more = watched(short_path, "peek", "c")
    assert (code, complaints(short_path)) == (0, [])
    assert UNPRINTABLE.findall(said + more) == []
    with Snapshot.take(short_path / "c") as snapshot:
        assert {snapshot[i]["label"] for i in range(len(snapshot))} == set(odd)
