"""The configuration of `sampling.engine: ray`."""

from __future__ import annotations

from typing import Annotated

from pydantic import ByteSize, Field, PositiveInt, field_validator

from growcache.config_source import ConfigModel

# Addresses: a Ray that the service starts itself, and the one on this machine.
LOCAL, AUTO = ("local", "auto")


class RayConfig(ConfigModel):
    """The cluster that runs samplers, their number, and the nodes to use."""

    address: str = Field(
        default=AUTO,
        description="auto: the cluster of this machine; local: a Ray on this machine that ends "
        "with the service; or HOST:PORT of a cluster's head.",
    )
    workers: PositiveInt = Field(
        default=2, description="The number of samplers. Each is an actor."
    )
    num_cpus: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        default=1.0, description="Processors that each sampler reserves."
    )
    resources: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(
        default={}, description="Other resources that each sampler reserves."
    )
    label_selector: dict[str, str] = Field(
        default={}, description="Labels that a sampler's node must have."
    )
    in_flight_bytes: Annotated[ByteSize, Field(gt=0)] = Field(
        default=ByteSize(1_000_000_000),
        description="The upper bound of shards on their way to this machine.",
    )

    @property
    def cluster(self) -> str:
        """The cluster's name in messages."""
        known = {AUTO: "the Ray of this machine", LOCAL: "a Ray of its own"}
        return known.get(self.address, f"Ray at {self.address}")

    @field_validator("address")
    @classmethod
    def _is_known(cls, value: str) -> str:
        host, _, port = value.rpartition(":")
        if value in (AUTO, LOCAL) or (host and "/" not in host and port.isdigit()):
            return value
        raise ValueError(f"expected auto, local or HOST:PORT, found {value!r}")
