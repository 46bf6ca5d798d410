"""The configuration of `sampling.engine: ray`."""

from __future__ import annotations

from typing import Annotated

from pydantic import ByteSize, Field, PositiveInt, field_validator

from growcache.config_source import ConfigModel

LOCAL, AUTO = (
    "local",
    "auto",
)  # addresses: a Ray of the service's own, and the one of this machine


class RayConfig(ConfigModel):
    """Which cluster runs samplers, how many, on which of its nodes."""

    address: str = AUTO
    workers: PositiveInt = 2
    num_cpus: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    resources: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(default={})
    label_selector: dict[str, str] = Field(default={})
    in_flight_bytes: Annotated[ByteSize, Field(gt=0)] = ByteSize(1_000_000_000)

    @property
    def cluster(self) -> str:
        """How messages call the cluster."""
        known = {AUTO: "the Ray of this machine", LOCAL: "a Ray of its own"}
        return known.get(self.address, f"Ray at {self.address}")

    @field_validator("address")
    @classmethod
    def _is_known(cls, value: str) -> str:
        host, _, port = value.rpartition(":")
        if value in (AUTO, LOCAL) or (host and "/" not in host and port.isdigit()):
            return value
        raise ValueError(f"expected auto, local or HOST:PORT, found {value!r}")
