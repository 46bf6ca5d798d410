"""A Slurm cluster of three nodes on this machine: Debian's daemons, as root, in a folder of their own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

NODES = ("n0", "n1", "n2")
DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "unshare")
CONFIG = """
ClusterName=test
SlurmctldHost=localhost
SlurmctldPort={port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
StateSaveLocation={folder}/state
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
SlurmdSpoolDir={folder}/spool-%n
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SchedulerType=sched/builtin
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
KillWait=5
ReturnToService=2
{nodes}
PartitionName=all Nodes=ALL Default=YES
"""
# On one machine both nodes have one disk: a mount shows each what is its own.
NODE = """
mount --bind "$0/hosts" /etc/hosts && mount --bind "$0/scratch-$1" "$0/scratch" && exec slurmd -N "$1"
"""


def can_run() -> bool:
    """Return whether a cluster can be started here."""
    return os.geteuid() == 0 and all(shutil.which(name) for name in DAEMONS)


class Cluster:
    """A running cluster; jobs find the folder ``scratch`` on the disk of each node."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.scratch = folder / "scratch"
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, *words: str, **environment: str) -> str:
        """Run a command of Slurm, and return what it prints."""
        done = subprocess.run(
            words,
            check=True,
            capture_output=True,
            text=True,
            timeout=300,
            env=self.environment | environment,
        )
        return done.stdout.strip()

    def state(self, job: str) -> str:
        return self.run("squeue", "--noheader", "--format=%T", "--states=all", f"--jobs={job}")

    def end_jobs(self) -> None:
        """Cancel all jobs, and wait until their processes are gone."""
        self.run("scancel", "--user=root")
        _wait_until(lambda: not self.run("squeue", "--noheader"), "no job is left")

    def disk_of(self, node: str) -> Path:
        return self.folder / f"scratch-{node}"


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Run a cluster in the block, whose files are in a folder."""
    for name in ("state", "scratch", *(f"scratch-{node}" for node in NODES)):
        (folder / name).mkdir()
    host = socket.gethostname()
    nodes = "\n".join(
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={_free_port()} CPUs=2"
        for node in NODES
    )
    config = CONFIG.format(folder=folder, port=_free_port(), nodes=nodes)
    (folder / "slurm.conf").write_text(config)
    hosts = Path("/etc/hosts").read_text() + f"\n127.0.0.1 {' '.join(NODES)}\n"
    (folder / "hosts").write_text(hosts)
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o400)
    made = Cluster(folder)
    files = {
        "socket": "sock",
        "key-file": "key",
        "pid-file": "pid",
        "seed-file": "seed",
        "log-file": "log",
    }
    options = [f"--{option}={folder}/munge.{end}" for option, end in files.items()]
    try:
        made.run("munged", "--force", *options)
        made.run("slurmctld", "-c")
        for node in NODES:
            made.run("unshare", "--mount", "sh", "-c", NODE, str(folder), node)
        _wait_until(
            lambda: made.run("sinfo", "--noheader", "--format=%T") == "idle",
            "all nodes are idle",
        )
        yield made
        made.end_jobs()
    finally:
        for name in (*NODES, "slurmctld", "munge"):
            _end(folder / f"{name}.pid")


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def _wait_until(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within 30 s: {what}")
        time.sleep(0.2)


def _end(pid_file: Path) -> None:
    if not pid_file.exists():
        return
    pid = int(pid_file.read_text())
    os.kill(pid, signal.SIGTERM)
    _wait_until(lambda: not Path(f"/proc/{pid}").exists(), f"{pid_file.stem} has ended")
