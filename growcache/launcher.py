"""The number of this machine among several, from their launcher (`sampling.nodes: auto`)."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from growcache.config import Config
from growcache.errors import ConfigError

COUNT = "GROWCACHE_NODES"  # for launchers that number their machines without counting them
# A step of Slurm may have fewer nodes than its job, and numbers those that it has.
_LAUNCHERS = (
    ("torchrun", "GROUP_RANK", ("GROUP_WORLD_SIZE",)),
    ("Slurm", "SLURM_NODEID", ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")),
)
_ORDINAL = re.compile(r"[^.]*-(\d+)(\..*)?", re.ASCII)
_BY_HAND = "set sampling.node and sampling.nodes to numbers"


class LaunchedNode(NamedTuple):
    """The number of this machine, from 0, and the number of machines."""

    node: int
    nodes: int
    source: str

    @property
    def words(self) -> str:
        """The text that `growcache run` prints."""
        return f"node {self.node} of {self.nodes} (they count from 0), by {self.source}"


def node_from_environment(env: Mapping[str, str], hostname: str) -> LaunchedNode:
    """Return this machine's number, the number of machines, and the launcher that named them.

    Raises:
        ConfigError: No launcher is found, several contradict each other, or the numbers are not
            valid.
    """
    found = [*_launched(env), *_ordinal(env, hostname)]
    if not found:
        raise ConfigError(f"sampling.nodes: auto: {_why_none(env, hostname)}", code="GC701")
    if len({(one.node, one.nodes) for one in found}) > 1:
        said = " and ".join(f"node {one.node} of {one.nodes} by {one.source}" for one in found)
        raise ConfigError(
            f"sampling.nodes: auto: this machine is {said}; {_BY_HAND}", code="GC701"
        )
    node, nodes, _ = found[0]
    source = " and ".join(one.source for one in found)
    if node >= nodes:
        raise ConfigError(
            f"sampling.nodes: auto: there is no node {node} of {nodes} by {source}, because "
            f"they count from 0; {_BY_HAND}",
            code="GC701",
        )
    return LaunchedNode(node, nodes, source)


def _launched(env: Mapping[str, str]) -> Iterator[LaunchedNode]:
    for launcher, rank, counts in _LAUNCHERS:
        if not env.get(rank):
            continue
        count = next((name for name in counts if env.get(name)), None)
        if count is None:
            raise ConfigError(
                f"sampling.nodes: auto: {rank} of {launcher} is set, but {counts[-1]} is not; "
                f"{_BY_HAND}",
                code="GC701",
            )
        source = f"{launcher} ({rank}, {count})"
        yield LaunchedNode(_number(env, rank), _number(env, count), source)


def _ordinal(env: Mapping[str, str], hostname: str) -> Iterator[LaunchedNode]:
    if not env.get(COUNT):
        return
    named = _ORDINAL.fullmatch(hostname)
    if named is None:
        raise ConfigError(
            f"sampling.nodes: auto: {COUNT} goes with a host name that ends in a number, such "
            f"as trainer-3 of a StatefulSet, found {hostname}; {_BY_HAND}",
            code="GC701",
        )
    source = f"the host name {hostname} ({COUNT})"
    yield LaunchedNode(int(named[1]), _number(env, COUNT), source)


def _number(env: Mapping[str, str], name: str) -> int:
    if re.fullmatch(r"\d{1,9}", env[name], re.ASCII):
        return int(env[name])
    raise ConfigError(
        f"sampling.nodes: auto: expected a number in {name}, found {env[name][:40]!r}",
        code="GC701",
    )


def _why_none(env: Mapping[str, str], hostname: str) -> str:
    if _ORDINAL.fullmatch(hostname):
        return (
            f"the host name {hostname} ends in a number, but Kubernetes does not say how many "
            f"replicas a StatefulSet has; set {COUNT} to that, or {_BY_HAND}"
        )
    if any(env.get(name) for name in _LAUNCHERS[1][2]):
        return f"this runs in a Slurm job, but not in one of its steps; start it with srun, or {_BY_HAND}"
    return (
        "found neither torchrun (GROUP_RANK, GROUP_WORLD_SIZE), nor Slurm (SLURM_NODEID, "
        f"SLURM_NNODES), nor a StatefulSet (a host name such as trainer-3, {COUNT}); {_BY_HAND}"
    )


def launched_node(
    config: Config, environment: Mapping[str, str] = os.environ
) -> LaunchedNode | None:
    """Return the launcher's numbers, or None if the configuration has its own."""
    if config.sampling.nodes != "auto":
        return None
    return node_from_environment(environment, socket.gethostname())


def with_launched_node(config: Config, environment: Mapping[str, str] = os.environ) -> Config:
    """Return the configuration with numbers instead of ``nodes: auto``."""
    found = launched_node(config, environment)
    if found is None:
        return config
    numbers = {"node": found.node, "nodes": found.nodes}
    sampling = config.sampling.model_copy(update=numbers)
    return config.model_copy(update={"sampling": sampling})
