"""Help, examples, completion and colours: what a person meets before anything is cached."""

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main

from growcache.cli.cli import COMMANDS, app, main
from growcache.cli.examples import EXAMPLES
from tests.cli.terminals import COMMAND, ROOT, terminal
from tests.filled import Filled

GROUP: Any = typer.main.get_command(app)
ALL = [example for examples in EXAMPLES.values() for example in examples]
# Examples that neither last, nor train, nor name a bucket that is none.
EXECUTED = [
    example
    for example in ALL
    if shlex.split(example)[1] in {"status", "check", "peek", "export", "clear", "init"}
    and not any(word in example for word in ("--watch", "--refetch", "s3://"))
]
PANELS = dict.fromkeys(panel for _, panel in COMMANDS)
ESCAPE = "\x1b["


def words_of(example: str) -> list[str]:
    """The arguments, up to a pipe."""
    words = shlex.split(example)
    return words[1 : words.index("|") if "|" in words else None]


def test_every_command_has_examples_and_no_other_has() -> None:
    assert set(EXAMPLES) == set(GROUP.commands)


@pytest.mark.parametrize("command", GROUP.commands)
def test_help_shows_every_example_on_one_line(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--help"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    for example in EXAMPLES[command]:
        assert f"Example: {example}" in lines


@pytest.mark.parametrize("example", ALL)
def test_every_example_is_understood(example: str) -> None:
    command, *rest = words_of(example)
    sub = GROUP.commands[command]
    with sub.make_context(command, rest):  # raises on an option or argument that is none
        pass


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(example, marks=[pytest.mark.slow] if number % 2 else [])
        for number, example in enumerate(EXECUTED)
    ],
)
def test_every_example_that_can_be_is_executed(
    example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Filled(tmp_path / "cache") as filled:
        filled.add(*range(13))
    monkeypatch.chdir(tmp_path)
    done = subprocess.run(
        [*COMMAND, *words_of(example)],
        input=b"y\n",
        capture_output=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert (done.returncode, done.stderr) == (0, b"")


COMPLETED = (
    "growcache.yaml",
    "conf/train.yaml",
    "data/0.npy",
    "caches/eeg/growcache.json",
    "caches/mri/growcache.json",
)


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("growcache sta", ["status"]),
        ("growcache status caches/", ["caches/eeg", "caches/mri"]),
        ("growcache peek da", []),  # no cache: the shell completes paths
        ("growcache run ", ["conf/train.yaml", "growcache.yaml"]),
        (
            "growcache run growcache.yaml --set cache.max_b",
            ["cache.max_bytes=", "cache.max_bytes=10GB"],
        ),
        ("growcache check cache --js", ["--json"]),
    ],
)
def test_the_shell_completes(typed: str, offered: list[str], tmp_path: Path) -> None:
    words = typed.split(" ")
    for file in COMPLETED:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    (bin_ / "growcache").write_text(f'#!/bin/sh\nexec {" ".join(COMMAND)} "$@"\n')
    (bin_ / "growcache").chmod(0o755)
    script = (
        'eval "$(growcache --show-completion bash)"\n'
        'complete -p growcache | grep -qe "-o default" || echo "paths are not completed"\n'
        f"COMP_WORDS=({shlex.join(words)}) COMP_CWORD={len(words) - 1}\n"
        "_growcache_completion growcache\n"
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        env={
            **os.environ,
            "PATH": f"{bin_}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "SHELL": "/bin/bash",
        },
    )
    assert done.stderr == ""
    found = sorted(line for line in done.stdout.splitlines() if line)
    assert found == sorted(offered)


def test_help_groups_the_commands_by_task(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    panels = [text.index(f"─ {panel} ─") for panel in PANELS]
    assert panels == sorted(panels)
    assert "─ Commands ─" not in text  # the panel of those without one


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    with Filled(tmp_path / "cache") as made:
        made.add(0, 1, 2)
    return made.root


@pytest.mark.parametrize("command", [["status"], ["peek"], ["check"]])
def test_a_terminal_gets_colours(command: list[str], filled: Path) -> None:
    with terminal(*command, filled) as seen:
        assert seen.end() == 0
        assert ESCAPE in seen.text


SHOWN = [["status"], ["peek"], ["check"], ["--help"]]
PLAIN: list[tuple[list[str], dict[str, str]]] = [
    (["--no-color"], {}),
    (["--no-color"], {"FORCE_COLOR": "1"}),
    ([], {"NO_COLOR": "1"}),
    ([], {"TERM": "dumb"}),
]
# Every day each command and each way to tell; all of both when there is time.
TOLD = [
    pytest.param(command, *way, marks=() if i == j else pytest.mark.slow)
    for i, command in enumerate(SHOWN)
    for j, way in enumerate(PLAIN)
]


@pytest.mark.parametrize(("command", "options", "environment"), TOLD)
def test_colours_are_off_when_told(
    command: list[str], options: list[str], environment: dict[str, str], filled: Path
) -> None:
    with terminal(*command, filled, *options, environment=environment) as seen:
        assert seen.end() == 0
        colours = [code for code in seen.text.split(ESCAPE)[1:] if code[:2] in colour_codes()]
        assert colours == []


def colour_codes() -> set[str]:
    return {f"{ten}{one}" for ten in (3, 4, 9) for one in range(8)}


def test_a_pipe_gets_colours_only_when_told(filled: Path) -> None:
    for forced in (False, True):
        done = subprocess.run(
            [*COMMAND, "status", filled],
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "PYTHONPATH": str(ROOT)}
            | ({"FORCE_COLOR": "1"} if forced else {}),
        )
        assert (ESCAPE in done.stdout) is forced


def test_forced_colours_never_break_json_lines(filled: Path) -> None:
    done = subprocess.run(
        ["bash", "-c", f"{shlex.join(COMMAND)} status {filled} --watch | head -n 1"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT), "FORCE_COLOR": "1"},
    )
    assert done.stdout.startswith('{"state":"stopped"')
    assert done.stderr == ""


def test_a_terminal_that_cannot_redraw_gets_lines(filled: Path) -> None:
    with terminal(
        "status", filled, "--watch", columns=200, environment={"TERM": "dumb"}
    ) as seen:
        text = seen.wait_for("30 samples in 3 shards")
    assert ESCAPE not in text
    assert text.startswith("stopped: ")


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "Start" in capsys.readouterr().out


def test_help_imports_little() -> None:
    program = (
        "import sys; from growcache.cli.cli import main; main(['--help'])\n"
        "heavy = {'numpy', 'torch', 'tensorflow', 'boto3', 'pydantic', 'obstore'}\n"
        "print(*(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300
    )
    assert done.stderr == "\n"


@pytest.mark.parametrize(
    ("option", "heavy"), [("--json", "numpy rich.live rich.table"), ("", "numpy")]
)
def test_a_status_imports_little(option: str, heavy: str, tmp_path: Path) -> None:
    with Filled(tmp_path / "cache") as made:
        made.add(0)
    program = (
        "import sys; from growcache.cli.cli import main\n"
        f"main(['status', {str(tmp_path / 'cache')!r}, *{option.split()!r}])\n"
        f"print(*(set({heavy.split()!r}) & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300
    )
    assert done.stderr == "\n"
