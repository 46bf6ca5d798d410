"""The files in deploy/ are well-formed, and name files, settings and commands that exist."""

from __future__ import annotations

import os
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
from growcache.launcher import node_from_environment
from growcache.monitor.guard import METRICS, PROBES
from growcache.monitor.http_server import are_metrics_public

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


def test_the_page_names_files_that_exist() -> None:
    blocks = re.findall(
        r"```sh\n(.*?)```", (ROOT / "docs" / "deploy/index.md").read_text(), re.S
    )
    named = {name for block in blocks for name in re.findall(r"\bdeploy/[\w@./-]+", block)}
    assert len(named) > 4
    assert [name for name in named if not (ROOT / name).exists()] == []


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


def manifests(name: str) -> dict[str, Any]:
    """Return the objects of a manifest by their kind."""
    objects = yaml.safe_load_all((DEPLOY / "kubernetes" / f"{name}.yaml").read_text())
    return {one["kind"]: one for one in objects}


def workloads() -> list[dict[str, Any]]:
    found = (manifests("job")["Job"], manifests("statefulset")["StatefulSet"])
    return [one["spec"]["template"] for one in found]


def environment(container: dict[str, Any]) -> dict[str, Any]:
    return {one["name"]: one.get("value") for one in container.get("env", ())}


def test_the_configuration_of_kubernetes_is_the_same() -> None:
    text = manifests("config")["ConfigMap"]["data"]["growcache.yaml"]
    assert yaml.safe_load(text) == yaml.safe_load((DEPLOY / "growcache.yaml").read_text())


@pytest.mark.parametrize("template", workloads(), ids=["job", "statefulset"])
def test_pods_run_commands_with_probes_that_are_answered(template: dict[str, Any]) -> None:
    (service,), (trainer,) = template["spec"]["initContainers"], template["spec"]["containers"]
    assert service["restartPolicy"] == "Always"
    assert is_command(service["args"])
    port = service["ports"][0]["containerPort"]
    assert service["args"][-1].endswith(f":{port}")
    annotations = template["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(port)
    paths = {
        service[f"{probe}Probe"]["httpGet"]["path"]
        for probe in ("startup", "liveness", "readiness")
    }
    asked = {path.partition("?")[0] for path in paths}
    assert asked <= set(PROBES)
    assert annotations["prometheus.io/path"] == METRICS
    assert are_metrics_public(environment(service))
    pod = template["spec"]["securityContext"]
    assert pod["runAsNonRoot"]
    assert pod["fsGroup"] == pod["runAsGroup"]
    users = [one["securityContext"]["runAsUser"] for one in (service, trainer)]
    assert users[0] != users[1]


def test_a_statefulset_counts_its_machines_once() -> None:
    spec = manifests("statefulset")["StatefulSet"]["spec"]
    (service,), (trainer,) = (
        spec["template"]["spec"][kind] for kind in ("initContainers", "containers")
    )
    settings = environment(service)
    last = (
        f"{manifests('statefulset')['StatefulSet']['metadata']['name']}-{spec['replicas'] - 1}"
    )
    found = node_from_environment(settings, last)
    assert (found.node, found.nodes) == (spec["replicas"] - 1, spec["replicas"])
    assert f"--nnodes={spec['replicas']}" in trainer["command"]
    overridden = load_config(DEPLOY / "growcache.yaml", (), settings)
    assert overridden.sampling.nodes == "auto"


def test_the_group_may_write_into_every_new_volume() -> None:
    """Docker makes one of root's only, where the image has no such folder."""
    (made,) = re.findall(
        r"install -d .*-g growcache -m 2770 (.*)", (DEPLOY / "Dockerfile").read_text()
    )
    mounts = [one for service in compose()["services"].values() for one in service["volumes"]]
    named = {
        mount.split(":")[1] for mount in mounts if mount.split(":")[0] in compose()["volumes"]
    }
    assert named == set(made.split())


def test_a_batch_job_ends_where_the_service_cannot_start(tmp_path: Path) -> None:
    for name, code in (("srun", 2), ("scontrol", 1)):
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {code}\n")
        (tmp_path / name).chmod(0o755)
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "1"}
    script = DEPLOY / "slurm" / "train.sbatch"
    assert subprocess.run(["bash", str(script)], env=variables, timeout=300).returncode == 2


def test_the_batch_script_is_bash() -> None:
    script = DEPLOY / "slurm" / "train.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True)
    (command,) = re.findall(r"growcache (run \S+)", script.read_text())
    assert is_command(command.split())
    for option in re.findall(r"train\.py .*?(--[a-z-]+)", script.read_text()):
        assert f'"{option}"' in (DEPLOY / "train.py").read_text()


@pytest.mark.slow
def test_validators_take_the_compose_file_and_the_manifests() -> None:
    compose_spec = pytest.importorskip("compose_spec")
    compose_spec.PyCompose.from_yaml((DEPLOY / "compose" / "compose.yaml").read_text())
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for path in (DEPLOY / "kubernetes").glob("*.yaml"):
        for one in manifests(path.stem).values():
            for version in ("1.29", kubernetes_validate.latest_version()):
                kubernetes_validate.validate(one, version, strict=True)


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
