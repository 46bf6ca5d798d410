"""The command line as people meet it: exit codes, one-line errors, speed, clean streams."""

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from growcache.cache.reader_lease import Lease
from growcache.cache.status import read_status
from growcache.cli.cli import main
from tests.filled import Filled

COMMAND = [sys.executable, "-m", "growcache"]


@pytest.fixture
def filled(tmp_path: Path) -> Filled:
    """A cache of 30 samples in three shards, which no process uses."""
    made = Filled(tmp_path / "cache")
    made.add(0, 1, 2)
    made.cache.close()
    return made


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A config of a source of 60 arrays of 16 KiB."""
    (tmp_path / "data").mkdir()
    for i in range(60):
        np.save(tmp_path / "data" / f"{i:02d}.npy", np.full((64, 64), i, "<f4"))
    file = tmp_path / "growcache.yaml"
    file.write_text(
        f"source: {{url: {tmp_path}/data/*.npy}}\n"
        f"cache: {{path: {tmp_path}/cache, max_bytes: 4MB}}\n"
    )
    return file


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert 1 <= len(lines) <= 2
    assert captured.err.startswith("growcache: ")
    return captured.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nonsense"], "No such command 'nonsense'"),
        (["run"], "Missing argument 'CONFIG'. See: growcache run --help"),
        (["run", "a.yaml", "--nonsense"], "No such option"),
        (["demo", "--epochs", "many"], "Invalid value for '--epochs'"),
        (["run", "no.yaml"], "no config at no.yaml; write one with: growcache init no.yaml"),
        (["status", "nowhere"], "no cache at"),
        (["check", "nowhere"], "no cache at"),
        (["peek", "nowhere"], "no cache at"),
        (["clear", "nowhere", "--yes"], "no cache at"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert said in error_of(capsys)


def test_a_bad_setting_is_named(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(config), "--set", "cache.max_byte=1GB"]) == 2
    assert "did you mean max_bytes?" in error_of(capsys)


def test_an_empty_listing_ends_the_run(config: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "run", config, "--set", "source.url=/nowhere/*.npy"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) <= 2
    assert "Traceback" not in done.stderr
    assert "/nowhere" in done.stderr


def test_run_writes_json_lines_where_there_is_no_terminal(config: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "run", config, "--until-full"], capture_output=True, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, b"")
    last = [json.loads(line) for line in done.stdout.splitlines()][-1]
    assert last["state"] == "stopped"
    assert last["drawn"] == 60
    assert main(["check", str(config.parent / "cache")]) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_service_cleanly(config: Path, number: signal.Signals) -> None:
    with subprocess.Popen([*COMMAND, "run", config], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert read_status(config.parent / "cache").state != "stopped"
        process.send_signal(number)
        process.stdout.read()
        assert process.wait(20) == 0
    assert read_status(config.parent / "cache").state == "stopped"
    assert list((config.parent / "cache" / "incoming").iterdir()) == []


def test_help_is_there_at_once() -> None:
    """In CPU time, which other work on the machine does not add to."""
    took = []
    for _ in range(3):  # the first start may have had to compile
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([*COMMAND, "--help"], capture_output=True, text=True, timeout=300)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert "demo" in done.stdout
    assert min(took) < 0.5


def test_a_sampler_starts_without_the_command_line() -> None:
    program = (
        "import sys; sys.argv[1:] = ['sampler']; import growcache.__main__ as m\n"
        "import growcache.sampling.sampler as w; w.main = lambda: None\n"
        "try: m.main()\nexcept SystemExit: pass\n"
        "print(*({'typer', 'rich', 'torch', 'tensorflow', 'boto3'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300
    )
    assert (done.stdout, done.stderr) == ("\n", "")


def test_when_the_reader_goes_away_it_ends_quietly(filled: Filled) -> None:
    command = f"{' '.join(COMMAND)} status {filled.root} --json --watch | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads(done.stdout)["samples"] == 30


def test_status_tells_the_counts(filled: Filled, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(filled.root)]) == 0
    assert "30 cached in 3 shards" in capsys.readouterr().out


def test_status_as_json(filled: Filled) -> None:
    done = subprocess.run(
        [*COMMAND, "status", filled.root, "--json"], capture_output=True, timeout=300
    )
    found = json.loads(done.stdout)
    assert (found["state"], found["samples"], found["shards"]) == ("stopped", 30, 3)


def test_check_finds_damage(filled: Filled, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(filled.root)]) == 0
    assert "all is well with 3 shards" in capsys.readouterr().out
    filled.damage(1)
    assert main(["check", str(filled.root)]) == 1
    assert "shard 1: " in capsys.readouterr().out


def test_check_as_json(filled: Filled) -> None:
    filled.damage(2)
    done = subprocess.run(
        [*COMMAND, "check", filled.root, "--json"], capture_output=True, timeout=300
    )
    found = json.loads(done.stdout)
    assert done.returncode == 1
    assert (found["ok"], found["shards"]) == (False, 3)
    assert {finding["shard"] for finding in found["findings"]} == {2}


def test_peek_shows_samples_and_origins(
    filled: Filled, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["peek", str(filled.root)]) == 0
    text = capsys.readouterr().out
    assert "30 samples in 3 shards" in text
    assert "x: float32[4]" in text


def test_peek_shows_the_one_that_is_asked_for(filled: Filled) -> None:
    done = subprocess.run(
        [*COMMAND, "peek", filled.root, "--sample", "2:7", "--json"],
        capture_output=True,
        timeout=300,
    )
    (example,) = json.loads(done.stdout)["examples"]
    assert (example["shard"], example["i"]) == (2, 7)
    assert example["arrays"]["id"]["values"] == 2007
    assert example["arrays"]["x"]["values"] == [2007.0] * 4


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("7:0", "shard 7 is not in the cache"),
        ("2:10", "shard 2 has 10 samples"),
        ("two", "SHARD:I"),
    ],
)
def test_peek_says_what_there_is_instead(
    filled: Filled, place: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["peek", str(filled.root), "--sample", place]) == 2
    assert said in error_of(capsys)


def test_clear_empties_a_cache_and_touches_nothing_else(
    filled: Filled, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = filled.root / "notes.txt"
    mine.write_text("mine")
    assert main(["clear", str(filled.root), "--yes"]) == 0
    assert "; freed " in capsys.readouterr().out
    left = {path.name for path in filled.root.rglob("*") if path.is_file()}
    assert left == {"notes.txt", "growcache.json", "supervisor.lock", "samplers.lock"}
    again = Filled(filled.root)
    again.add(0)
    again.cache.close()
    assert read_status(filled.root).samples == 10


def test_clear_asks_first(filled: Filled) -> None:
    done = subprocess.run(
        [*COMMAND, "clear", filled.root], input=b"n\n", capture_output=True, timeout=300
    )
    assert done.returncode == 1
    assert b"Delete" in done.stdout
    assert read_status(filled.root).samples == 30


def test_clear_spares_a_cache_that_is_in_use(
    filled: Filled, capsys: pytest.CaptureFixture[str]
) -> None:
    with Lease.create(filled.root, "train", [0, 1]):
        assert main(["clear", str(filled.root), "--yes"]) == 2
        assert f"pid {os.getpid()}" in error_of(capsys)
    owner = Filled(filled.root)
    assert main(["clear", str(filled.root), "--yes"]) == 2
    assert "is in use by pid" in error_of(capsys)
    owner.cache.close()
    assert read_status(filled.root).samples == 30


def test_init_writes_a_config_that_run_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "growcache.yaml"
    url = f"{tmp_path}/none/*.npy"
    assert main(["init", str(file), "--url", url, "--no-look"]) == 0
    assert f"growcache run {file}" in capsys.readouterr().out
    assert main(["init", str(file)]) == 2
    assert "--force" in error_of(capsys)
    assert main(["init", "-"]) == 0
    assert "max_bytes: 10GB" in capsys.readouterr().out


def test_a_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("growcache ")
