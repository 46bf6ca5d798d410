"""The files in deploy/ are well-formed, and name files, settings and commands that exist."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from growcache.cli.cli import app
from growcache.config_text import load_config

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "systemd" / "growcache@.service"
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())
    return found


def is_command(words: list[str]) -> bool:
    """Whether growcache has that command with these options."""
    command = COMMANDS[words[0]]
    known = {option for parameter in command.params for option in parameter.opts}
    return {word for word in words[1:] if word.startswith("--")} <= known


def test_the_configuration_is_one() -> None:
    config = load_config(DEPLOY / "growcache.yaml")
    mounts = compose()["services"]["service"]["volumes"]
    assert f"cache:{config.cache.path}" in mounts
    assert "../growcache.yaml:/etc/growcache.yaml:ro" in mounts


def test_an_image_is_built_of_files_that_its_context_has() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    kept = re.findall(r"^!(.*)$", (ROOT / ".dockerignore").read_text(), re.M)
    copied = [
        name
        for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.M)
        for name in line.split()[:-1]
    ]
    assert set(copied) == set(kept)
    assert all((ROOT / name).exists() for name in copied)
    stages = set(re.findall(r"^FROM .* AS (\w+)$", text, re.M))
    assert {one["build"]["target"] for one in compose()["services"].values()} <= stages
    (command,) = re.findall(r'CMD \["run", (".*?")\]', text)
    assert is_command(["run", command])


def test_both_containers_are_users_of_one_group_without_rights() -> None:
    services = compose()["services"]
    users = [one["user"].split(":") for one in services.values()]
    assert len({user for user, _ in users}) == 2
    assert len({group for _, group in users}) == 1
    for one in services.values():
        assert (one["read_only"], one["cap_drop"]) == (True, ["ALL"])
    assert is_command(services["service"]["command"])


def test_the_unit_starts_a_command_that_exists() -> None:
    (start,) = re.findall(r"^ExecStart=\S+/growcache (.*)$", UNIT.read_text(), re.M)
    assert is_command(start.split())
    (setting,) = re.findall(r"GROWCACHE_(\w+)=%S", UNIT.read_text())
    assert setting.lower().split("__") == ["cache", "path"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    here = tmp_path / UNIT.name
    here.write_text(
        re.sub(r"(?<=^ExecStart=)\S+", sys.executable, UNIT.read_text(), flags=re.M)
    )
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(here)], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
