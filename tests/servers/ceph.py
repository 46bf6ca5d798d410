"""A Ceph RADOS Gateway of one node, its data in memory: a strict S3 to conform to.

Needs Debian's radosgw, ceph-mon and ceph-osd. All daemons authenticate (cephx); without that
the gateway does not start. Everything lives in one directory and on free ports, so that
several may run side by side.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

from tests.servers import S3Server, free_port, spawn, stop, wait_until

PROGRAMS = (
    "ceph", "ceph-authtool", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin",
)  # fmt: skip
KEY, SECRET = "growcache", "growcache-secret"
_GIGABYTE = 1 << 30

_CONFIG = """
[global]
fsid = {fsid}
mon_host = {mon_host}
public_network = 127.0.0.0/8
cluster_network = 127.0.0.0/8
auth_cluster_required = cephx
auth_service_required = cephx
auth_client_required = cephx
keyring = {root}/keyring
run_dir = {root}
admin_socket = {root}/$name.asok
log_file = {root}/$name.log
mon_data = {root}/mon
mon_data_avail_crit = 0
mon_data_avail_warn = 1
mon_max_pg_per_osd = 1000
# Each pool is made by several changes, which would wait a second each for others to join.
paxos_propose_interval = 0.02
paxos_min_wait = 0.01
mon_allow_pool_size_one = true
mon_warn_on_pool_no_redundancy = false
osd_data = {root}/osd
osd_crush_chooseleaf_type = 0
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 4
osd_pool_default_pg_autoscale_mode = off

[osd]
keyring = {root}/osd/keyring
osd_objectstore = memstore
memstore_device_bytes = {memory}
osd_op_num_shards = 2

[client.admin]
rgw_frontends = beast endpoint=127.0.0.1:{port}
rgw_data = {root}/rgw
rgw_thread_pool_size = 32
rgw_enable_usage_log = false
rgw_run_sync_thread = false
"""


def missing() -> str:
    """Why there can be no gateway on this machine; empty if there can."""
    lacking = [name for name in PROGRAMS if shutil.which(name) is None]
    if not lacking:
        return ""
    return (
        f"no {', '.join(lacking)}; "
        "apt-get install --no-install-recommends radosgw ceph-mon ceph-osd"
    )


@contextlib.contextmanager
def ceph(root: Path, memory_bytes: int = 4 * _GIGABYTE) -> Iterator[S3Server]:
    """A running gateway; its daemons end with the block, or with this process.

    Args:
        root: an empty directory, on a short path (sockets have names of 107 bytes at most).
        memory_bytes: how much it can store.
    """
    node = _Node(root, memory_bytes)
    try:
        node.start_monitor()
        node.start_osd()
        node.start_gateway()
        yield S3Server("ceph", node.endpoint, KEY, SECRET, checks_credentials=True)
    finally:
        for process in reversed(node.running):
            stop(process)


class _Node:
    def __init__(self, root: Path, memory_bytes: int) -> None:
        self.root = root
        self.running: list[subprocess.Popen[bytes]] = []
        port, self.v2, self.v1 = free_port(), free_port(), free_port()
        self.endpoint = f"http://127.0.0.1:{port}"
        self.fsid = str(uuid.uuid4())
        for name in ("mon", "osd", "rgw"):
            (root / name).mkdir()
        self.config = root / "ceph.conf"
        self.config.write_text(
            _CONFIG.format(
                root=root, fsid=self.fsid, mon_host=self.monitor, memory=memory_bytes, port=port
            )
        )

    @property
    def monitor(self) -> str:
        return f"[v2:127.0.0.1:{self.v2},v1:127.0.0.1:{self.v1}]"

    def start_monitor(self) -> None:
        keys, monmap = self.root / "keyring", self.root / "monmap"
        everything = (
            "--cap",
            "mon",
            "allow *",
            "--cap",
            "osd",
            "allow *",
            "--cap",
            "mgr",
            "allow *",
        )
        self.run(
            "ceph-authtool",
            "--create-keyring",
            keys,
            "--gen-key",
            "-n",
            "mon.",
            *everything[:3],
        )
        self.run("ceph-authtool", keys, "--gen-key", "-n", "client.admin", *everything)
        self.run(
            "monmaptool", "--create", "--fsid", self.fsid, "--addv", "a", self.monitor, monmap
        )
        self.run("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap, "--keyring", keys)
        self.spawn("ceph-mon", "-i", "a", "-f")
        wait_until(lambda: self.works("ceph", "mon", "stat"), "ceph-mon")

    def start_osd(self) -> None:
        number, keys = str(uuid.uuid4()), self.root / "osd" / "keyring"
        self.run("ceph", "osd", "new", number)
        self.run("ceph-authtool", "--create-keyring", keys, "--gen-key", "-n", "osd.0")
        self.run("ceph", "auth", "add", "osd.0", "mon", "allow *", "osd", "allow *", "-i", keys)
        self.run("ceph-osd", "-i", "0", "--mkfs", "--keyring", keys, "--osd-uuid", number)
        self.spawn("ceph-osd", "-i", "0", "-f")
        self.run(
            "ceph", "osd", "crush", "add", "osd.0", "1.0", "root=default", "host=localhost"
        )
        wait_until(lambda: b"1 up" in self.run("ceph", "osd", "stat"), "ceph-osd")

    def start_gateway(self) -> None:
        self.spawn("radosgw", "-n", "client.admin", "-f")
        wait_until(self.answers, "radosgw")
        user = ("--uid=growcache", "--display-name=growcache")
        keys = (f"--access-key={KEY}", f"--secret-key={SECRET}")
        self.run("radosgw-admin", "user", "create", *user, *keys)

    def answers(self) -> bool:
        try:
            urllib.request.urlopen(self.endpoint, timeout=30).close()
        except urllib.error.HTTPError as refusal:
            refusal.close()
            return True
        except OSError:
            return False
        return True

    def run(self, program: str, *arguments: str | Path) -> bytes:
        found = self._finished(program, *arguments)
        if found.returncode:
            said = found.stderr.decode(errors="replace")[-2000:]
            raise RuntimeError(f"{program} {arguments[0]} failed: {said}")
        return found.stdout

    def works(self, program: str, *arguments: str | Path) -> bool:
        return self._finished(program, *arguments).returncode == 0

    def spawn(self, program: str, *arguments: str) -> None:
        with (self.root / f"{program}.out").open("wb") as log:
            self.running.append(spawn([program, "-c", self.config, *arguments], log))

    def _finished(
        self, program: str, *arguments: str | Path
    ) -> subprocess.CompletedProcess[bytes]:
        # Tools that make keys and maps take no -c; the environment serves all alike.
        return subprocess.run(
            [program, *map(str, arguments)],
            capture_output=True,
            timeout=300,
            check=False,
            env={**os.environ, "CEPH_CONF": str(self.config)},
        )
