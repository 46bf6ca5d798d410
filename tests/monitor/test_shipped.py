"""What ships for Prometheus and Grafana asks for metrics that there are, and fires where it should."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from growcache.cache.status_model import Status
from growcache.cli.cli import main
from growcache.cli.dashboard import shipped_file
from growcache.monitor.prometheus import exposition
from tests.monitor.test_metrics import full_metrics

HERE = Path(__file__).parent
PROMTOOL = shutil.which("promtool")


@pytest.fixture(scope="module")
def exposed(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("exposed"))
    status = Status(path=path, coverage=0.5, population_samples=9.0, updated_at=1.0)
    return exposition({"c": lambda: (status, full_metrics())}, "")[0].decode()


def names_in(text: str) -> set[str]:
    return set(re.findall(r"\bgrowcache_[a-z_]+", text))


@pytest.mark.parametrize("name", ["grafana.json", "alerts.yaml"])
def test_every_metric_that_is_asked_for_exists(name: str, exposed: str) -> None:
    text = shipped_file(name)
    if name == "grafana.json":
        panels = json.loads(text)["panels"]
        asked = names_in(" ".join(t["expr"] for p in panels for t in p.get("targets", ())))
        assert len(asked) > 15
    else:
        rules = yaml.safe_load(text)["groups"][0]["rules"]
        asked = names_in(" ".join(rule["expr"] for rule in rules))
        assert len(rules) == 5
    there = set(re.findall(r"^(growcache_[a-z_]+)[{ ]", exposed, re.MULTILINE))
    assert asked - there == set()


def test_the_command_prints_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dashboard", "--grafana"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "growcache"
    assert main(["dashboard", "--alerts"]) == 0
    assert "GrowcacheStalled" in capsys.readouterr().out
    assert main(["dashboard"]) == 2
    assert "name the folder of a cache" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
def test_promtool_accepts_rules_and_metrics(tmp_path: Path, exposed: str) -> None:
    def promtool(*words: str, text: str | None = None) -> None:
        command = [PROMTOOL or "", *words]
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    rules, tests = tmp_path / "alerts.yaml", tmp_path / "tests.yaml"
    rules.write_text(
        re.sub(r"(?s)\n        annotations:.*?(?=\n\n|\Z)", "", shipped_file("alerts.yaml"))
    )
    tests.write_text((HERE / "alerts_test.yaml").read_text().replace("ALERTS", str(rules)))
    promtool("check", "rules", str(rules))
    promtool("test", "rules", str(tests))
    promtool("check", "metrics", text=exposed)
