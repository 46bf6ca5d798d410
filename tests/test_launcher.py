"""`sampling.nodes: auto`: what launchers say of this machine, and what they cannot mean."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from growcache.cli.cli import main
from growcache.config import Config
from growcache.config_text import load_config
from growcache.errors import ConfigError
from growcache.launcher import node_from_environment, with_launched_node
from growcache.sampling.config_reload import merged_config
from growcache.usercode import child_environment

TORCHRUN = {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "3"}
SLURM = {"SLURM_NODEID": "1", "SLURM_NNODES": "3"}
AUTO = {"source": {"url": "data/*.npy"}, "sampling": {"nodes": "auto"}}


@pytest.mark.parametrize(
    ("env", "hostname", "node", "nodes", "source"),
    [
        (TORCHRUN, "gpu-07", 1, 3, "torchrun (GROUP_RANK, GROUP_WORLD_SIZE)"),
        (SLURM, "a", 1, 3, "Slurm (SLURM_NODEID, SLURM_NNODES)"),
        ({"SLURM_NODEID": "0", "SLURM_JOB_NUM_NODES": "2"}, "a", 0, 2, "Slurm (SLURM_NODEID, SLURM_JOB_NUM_NODES)"),
        (SLURM | {"SLURM_NNODES": "8", "SLURM_STEP_NUM_NODES": "2"}, "a", 1, 2, "Slurm (SLURM_NODEID, SLURM_STEP_NUM_NODES)"),
        (SLURM | {"GROUP_RANK": ""}, "a", 1, 3, "Slurm (SLURM_NODEID, SLURM_NNODES)"),
        ({"GROWCACHE_NODES": "4"}, "trainer-3", 3, 4, "the host name trainer-3 (GROWCACHE_NODES)"),
        ({"GROWCACHE_NODES": "4"}, "my-job-0.my-job.ns.svc", 0, 4, "the host name my-job-0.my-job.ns.svc (GROWCACHE_NODES)"),
        (TORCHRUN | SLURM, "a", 1, 3, "torchrun (GROUP_RANK, GROUP_WORLD_SIZE) and Slurm (SLURM_NODEID, SLURM_NNODES)"),
    ],
)  # fmt: skip
def test_a_launcher_says_which_machine_this_is(
    env: dict[str, str], hostname: str, node: int, nodes: int, source: str
) -> None:
    assert node_from_environment(env, hostname) == (node, nodes, source)


@pytest.mark.parametrize(
    ("env", "hostname", "said"),
    [
        ({}, "laptop", "found neither torchrun .* nor Slurm .* nor a StatefulSet"),
        ({}, "trainer-3", "Kubernetes does not say how many .* set GROWCACHE_NODES"),
        ({"GROWCACHE_NODES": "4"}, "laptop", "ends in a number, .* found laptop"),
        ({"GROWCACHE_NODES": "3"}, "trainer-3", "no node 3 of 3"),
        ({"GROUP_RANK": "1"}, "a", "GROUP_RANK .* GROUP_WORLD_SIZE is not"),
        ({"SLURM_NODEID": "1"}, "a", "SLURM_NODEID .* SLURM_JOB_NUM_NODES is not"),
        ({"SLURM_NNODES": "2"}, "a", "in a Slurm job, but not in one of its steps; start it with srun"),
        (TORCHRUN | {"GROUP_RANK": "-1"}, "a", "a number in GROUP_RANK, found '-1'"),
        (TORCHRUN | {"GROUP_WORLD_SIZE": "0"}, "a", "no node 1 of 0"),
        (TORCHRUN | SLURM | {"SLURM_NODEID": "2"}, "a", "node 1 of 3 by torchrun .* and node 2 of 3 by Slurm"),
        (TORCHRUN | {"GROWCACHE_NODES": "4"}, "t-1", "node 1 of 3 by torchrun .* and node 1 of 4 by the host name"),
    ],
)  # fmt: skip
def test_what_launchers_cannot_mean_is_refused(
    env: dict[str, str], hostname: str, said: str
) -> None:
    with pytest.raises(
        ConfigError, match=f"^sampling.nodes: auto: .*{said}.*set sampling.node|{said}"
    ) as found:
        node_from_environment(env, hostname)
    assert "\n" not in str(found.value)


NAMES = st.sampled_from([*TORCHRUN, *SLURM, "SLURM_JOB_NUM_NODES", "GROWCACHE_NODES"])
TEXTS = st.one_of(st.integers(0, 5).map(str), st.text(max_size=4))


@given(st.dictionaries(NAMES, TEXTS), st.sampled_from(["a", "a-2", "a-b-4.c", ""]))
def test_whatever_is_set_it_is_a_node_that_exists_or_one_clear_error(
    env: dict[str, str], hostname: str
) -> None:
    try:
        node, nodes, _ = node_from_environment(env, hostname)
    except ConfigError:
        return
    assert 0 <= node < nodes


def test_numbers_take_the_place_of_auto() -> None:
    auto = load_config(AUTO)
    settled = with_launched_node(auto, TORCHRUN)
    assert settled.sampling.node_of_nodes == (1, 3)
    assert with_launched_node(settled, {}) is settled
    assert Config.model_validate(settled.model_dump()) == settled
    assert merged_config(settled, with_launched_node(auto, TORCHRUN)) == (settled, [])
    with pytest.raises(ConfigError, match="was not replaced"):
        _ = auto.sampling.node_of_nodes


def test_auto_leaves_no_choice_of_the_node() -> None:
    with pytest.raises(ConfigError, match="leave out node: 0"):
        load_config({**AUTO, "sampling": {"nodes": "auto", "node": 0}})


def test_run_without_a_launcher_is_bad_usage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (*TORCHRUN, *SLURM, "SLURM_JOB_NUM_NODES", "SLURM_STEP_NUM_NODES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GROWCACHE_NODES", "many")
    monkeypatch.setattr("socket.gethostname", lambda: "trainer-1")
    (tmp_path / "c.yaml").write_text("source: {url: data/*.npy}\nsampling: {nodes: auto}\n")
    assert main(["run", str(tmp_path / "c.yaml")]) == 2
    assert "expected a number in GROWCACHE_NODES" in capsys.readouterr().err


@pytest.mark.slow
def test_torchrun_says_it(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = tmp_path / "node.py"
    script.write_text(
        "import os\nfrom growcache.launcher import node_from_environment\n"
        "print(*node_from_environment(os.environ, 'a'), sep='|')\n"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=2",
        "--nproc-per-node=1",
    ]
    command += [f"--master-port={port}", "--master-addr=127.0.0.1"]
    machines = [
        subprocess.Popen(
            [*command, f"--node-rank={node}", str(script)],
            env=child_environment(),
            stdout=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]
    said = [machine.communicate(timeout=300)[0].strip() for machine in machines]
    assert said == [f"{node}|2|torchrun (GROUP_RANK, GROUP_WORLD_SIZE)" for node in range(2)]
