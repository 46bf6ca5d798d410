"""The configuration: one frozen model with a section for each part of the service.

The README lists the names and defaults. Unknown keys are errors. `config_text` reads a
configuration from YAML, the environment and ``--set``. `config_source` has the section of a
source.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    BeforeValidator,
    ByteSize,
    Discriminator,
    Field,
    PositiveInt,
    Tag,
    TypeAdapter,
    field_validator,
    model_validator,
)

from growcache.config_ray import RayConfig
from growcache.config_source import ConfigModel, SourceConfig, WeightedSource, compiled
from growcache.errors import ConfigError
from growcache.schema import Schema
from growcache.secrecy import remember_secrets, secret_settings


def _source_tag(value: Any) -> str:
    return SEVERAL_SOURCES if isinstance(value, list | tuple) else ONE_SOURCE


# Branches of ``source``, which users need not know.
ONE_SOURCE, SEVERAL_SOURCES = ("one", "several")


_SourceSetting: TypeAlias = Annotated[
    Annotated[SourceConfig, Tag(ONE_SOURCE)]
    | Annotated[tuple[WeightedSource, ...], Tag(SEVERAL_SOURCES)],
    Discriminator(_source_tag),
]


class LabelGroup(ConfigModel):
    """Groups by a column of the labels: objects with equal values belong together."""

    label: str = Field(description="One of source.labels.columns.")


class BlockGroup(ConfigModel):
    """Groups of consecutive indices of a Dataset, because neighbours may be alike."""

    block: PositiveInt = Field(description="The number of indices in a group.")


class SplitConfig(ConfigModel):
    """The share of the objects to draw from: a subset, by a hash of each object's group.

    The split has its own seed, so two caches of one split with different ``sampling.seed``
    share no group.
    """

    group: str | LabelGroup | BlockGroup | None = Field(
        default=None,
        description="The group of an object: the match of (?P<group>...) of a regular expression in "
        "the key, {label: COLUMN} of source.labels, or {block: N} neighbouring indices of a Dataset. "
        "Without it each object is a group.",
    )
    fractions: dict[str, Annotated[float, Field(gt=0, le=1)]] = Field(
        description="The subsets and their shares of the groups: {train: 0.8, val: 0.2}."
    )
    use: str = Field(description="The subset that this cache draws from.")
    seed: int = Field(
        default=0,
        description="Another seed assigns groups to other subsets. sampling.seed has no effect on the split.",
    )

    @field_validator("group", mode="before")
    @classmethod
    def _is_text_or_label(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and set(value) not in ({"label"}, {"block"}):
            raise ValueError(
                "expected a regular expression, {label: COLUMN}, or {block: N} for a dataset"
            )
        return value

    @field_validator("group")
    @classmethod
    def _names_the_group(
        cls, value: str | LabelGroup | BlockGroup | None
    ) -> str | LabelGroup | BlockGroup | None:
        if not isinstance(value, str) or "group" in compiled(value).groupindex:
            return value
        raise ValueError("expected (?P<group>…) around the part that tells groups apart")

    @field_validator("fractions")
    @classmethod
    def _of_the_whole(cls, value: dict[str, float]) -> dict[str, float]:
        if not value or (total := sum(value.values())) > 1 + 1e-9:
            raise ValueError(
                f"expected shares that add up to at most 1, found {total:g}"
                if value
                else "name a subset"
            )
        return value

    @model_validator(mode="after")
    def _uses_one(self) -> SplitConfig:
        if self.use not in self.fractions:
            known = ", ".join(self.fractions)
            raise ValueError(
                f"use: expected one of the fractions ({known}), found {self.use!r}"
            )
        return self


class StrataConfig(ConfigModel):
    """How often the objects of each stratum are drawn."""

    by: str = Field(
        description="The name of an object's stratum: a column of source.labels, a regular expression with "
        "(?P<stratum>...), or label with format image."
    )
    weights: (
        Literal["balanced", "natural", "sqrt"]
        | dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]]
    ) = Field(
        default="balanced",
        description="balanced: all equally often; sqrt: by the square root of their sizes; natural: by their "
        "sizes; or a number for each name. A missing name counts as 1, and 0 means never.",
    )

    @field_validator("by")
    @classmethod
    def _can_be_compiled(cls, value: str) -> str:
        compiled(value)
        return value

    @field_validator("weights", mode="before")
    @classmethod
    def _named_in_text(cls, value: Any) -> Any:
        # Folders named 0, 1, … are numbers in YAML.
        return {str(k): v for k, v in value.items()} if isinstance(value, Mapping) else value


DeclaredSchema: TypeAlias = dict[str, tuple[str | int | None, ...]]  # dtype, then dimensions


def _declared_schema(value: Any) -> Any:
    """Return ``{x: [float32, null, 64], note: str}`` with NumPy dtypes and dimensions."""
    if value == "auto":
        return value
    if not isinstance(value, Mapping) or not value:
        raise ValueError("expected auto, or names with [dtype, dimension, …]")
    declared = Schema.declared({str(name): field for name, field in value.items()})
    return {name: (declared[name].dtype, *declared[name].shape) for name in map(str, value)}


_SchemaSetting: TypeAlias = Annotated[
    Literal["auto"] | DeclaredSchema,
    BeforeValidator(
        _declared_schema,
        json_schema_input_type=Literal["auto"] | dict[str, str | tuple[str | int | None, ...]],
    ),
]


with warnings.catch_warnings():
    # pydantic's models inherit a method of this name from its first version.
    warnings.filterwarnings("ignore", 'Field name "schema"')

    class SamplingConfig(ConfigModel):
        """How samples are drawn, and by how many processes."""

        seed: int = 0
        order: Literal["permutation", "replacement"] = "permutation"
        samples_per_object: Literal["auto"] | PositiveInt = "auto"
        weight_by: Literal["samples", "objects"] = "samples"
        shard_samples: Literal["auto"] | PositiveInt = "auto"
        schema: _SchemaSetting = "auto"  # type: ignore[assignment]
        strata: StrataConfig | None = None
        transform: str | None = None
        transform_options: dict[str, Any] = Field(default={})
        max_skipped: Annotated[float, Field(ge=0, le=1)] = 0.01
        workers: Annotated[int, Field(ge=0, le=256)] = 2
        concurrency: Annotated[int, Field(ge=1, le=4096)] = 16
        timeout_seconds: Annotated[float, Field(gt=0)] = 60.0
        max_egress: ByteSize | None = None
        max_bytes_per_second: ByteSize | None = None
        node: Annotated[int, Field(ge=0)] | None = None
        nodes: Literal["auto"] | Annotated[int, Field(ge=1, le=4096)] = 1
        engine: Literal["local", "ray"] = "local"
        ray: RayConfig = RayConfig()

        @model_validator(mode="before")
        @classmethod
        def _samplers_of_a_cluster_only(cls, values: Any) -> Any:
            """Default ``workers`` to 0 with Ray, so that no sampler runs on this machine."""
            if isinstance(values, Mapping) and values.get("engine") == "ray":
                return {"workers": 0, **values}
            return values

        @model_validator(mode="after")
        def _has_samplers(self) -> SamplingConfig:
            if self.samplers < 1:
                raise ValueError("workers: expected at least 1, unless engine is ray")
            return self

        @property
        def samplers(self) -> int:
            """Number of samplers, on this machine and elsewhere."""
            return self.workers + self.samplers_elsewhere

        @property
        def samplers_elsewhere(self) -> int:
            """Number of samplers on the nodes of a cluster."""
            return self.ray.workers if self.engine == "ray" else 0

        @model_validator(mode="after")
        def _node_exists(self) -> SamplingConfig:
            if self.nodes == "auto":
                if self.node is not None:
                    raise ValueError(
                        "nodes: auto takes the number of this node from the launcher, too; "
                        f"leave out node: {self.node}"
                    )
            elif self.node is not None and self.node >= self.nodes:
                raise ValueError(
                    f"node {self.node} does not exist among nodes: {self.nodes} (they count from 0)"
                )
            return self

        @property
        def node_of_nodes(self) -> tuple[int, int]:
            """The number of this machine, and the number of machines."""
            if self.nodes == "auto":
                raise ConfigError(
                    "sampling.nodes: auto was not replaced by what the launcher says; set "
                    "sampling.node and sampling.nodes to numbers",
                    code="GC701",
                )
            return self.node or 0, self.nodes


def _parse_share_or_bytes(value: Any) -> Any:
    """Return ``"1%"`` as the float 0.01, and anything else as a number of bytes."""
    if isinstance(value, str) and (match := re.fullmatch(r"\s*([\d.]+)\s*%\s*", value)):
        return float(match[1]) / 100
    return (
        value if isinstance(value, float) and value < 1 else _BYTE_SIZE.validate_python(value)
    )


_BYTE_SIZE = TypeAdapter(ByteSize)


class CacheConfig(ConfigModel):
    """The cache's path, bound and order of eviction."""

    path: Path = Path("cache")
    max_bytes: ByteSize = ByteSize(10_000_000_000)
    max_samples: PositiveInt | None = None
    format: Literal["tfrecord", "npy"] = "tfrecord"
    eviction: Literal["fifo", "random", "most_used", "none"] = "fifo"
    min_uses: Annotated[int, Field(ge=0)] = 1
    max_reuse: PositiveInt | None = None
    on_max_reuse: Literal["warn", "wait"] = "warn"
    resume_seconds: Annotated[float, Field(ge=0)] = 600.0
    min_free: Annotated[
        float | int,
        BeforeValidator(_parse_share_or_bytes, json_schema_input_type=float | int | str),
    ] = 0.01
    allow_network_filesystem: bool = False

    @model_validator(mode="after")
    def _fixed_set(self) -> CacheConfig:
        if self.max_samples is not None and self.eviction != "none":
            raise ValueError("max_samples fixes the set: it needs eviction: none")
        return self

    @model_validator(mode="after")
    def _uses_can_be_reached(self) -> CacheConfig:
        if self.max_reuse is not None and self.min_uses > self.max_reuse:
            raise ValueError(
                f"min_uses {self.min_uses} is more than max_reuse {self.max_reuse}: no shard "
                "could ever leave"
            )
        return self


_BYTE_LIMITS = ("max_egress", "max_bytes_per_second")


class Config(ConfigModel):
    """The whole configuration, frozen and checked; `load_config` makes it.

    Attributes:
        source: The source, or a tuple of several mixed sources with weights.
        split: The subset of the objects to draw from; None draws from all.
        sampling: How samples are drawn, and by how many processes.
        cache: The cache's path, bound and order of eviction.
    """

    source: _SourceSetting
    split: SplitConfig | None = None
    sampling: SamplingConfig = SamplingConfig()
    cache: CacheConfig = CacheConfig()

    @model_validator(mode="before")
    @classmethod
    def _remember_secrets(cls, values: Any) -> Any:
        remember_secrets(values)  # in every process that gets a configuration
        return values

    @field_validator("source")
    @classmethod
    def _at_least_one(
        cls, value: SourceConfig | tuple[WeightedSource, ...]
    ) -> SourceConfig | tuple[WeightedSource, ...]:
        if value == ():
            raise ValueError("name at least one")
        if isinstance(value, tuple) and len({one.on_missing for one in value}) > 1:
            raise ValueError("expected the same on_missing in all sources")
        return value

    @property
    def sources(self) -> tuple[SourceConfig, ...]:
        """The source, or all mixed sources."""
        return self.source if isinstance(self.source, tuple) else (self.source,)

    @property
    def urls(self) -> tuple[str, ...]:
        """The URLs of all sources. A listed object has the index of its URL in this tuple."""
        return tuple(url for source in self.sources for url in source.url)

    @property
    def weights(self) -> tuple[float, ...] | None:
        """The weights of mixed sources; None if there is one source."""
        if not isinstance(self.source, tuple):
            return None
        return tuple(source.weight for source in self.source)

    @model_validator(mode="after")
    def _groups_by_a_label(self) -> Config:
        group = self.split.group if self.split is not None else None
        labels = [source.labels for source in self.sources]
        columns = [set(one.columns) if one is not None else set() for one in labels]
        if isinstance(group, LabelGroup) and not all(group.label in some for some in columns):
            raise ValueError(
                f"split.group: expected one of source.labels.columns, found {group.label!r}"
            )
        return self

    @model_validator(mode="after")
    def _has_indices(self) -> Config:
        datasets = [source.dataset is not None for source in self.sources]
        group = self.split.group if self.split is not None else None
        if isinstance(group, BlockGroup) and not all(datasets):
            raise ValueError("split.group: block counts the indices of source.dataset")
        limits = {name: getattr(self.sampling, name) for name in _BYTE_LIMITS}
        limited = [name for name, value in limits.items() if value is not None]
        if any(datasets) and limited:
            raise ValueError(
                f"sampling.{limited[0]}: growcache does not see the bytes that source.dataset "
                "reads; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _has_one_kind_of_weights(self) -> Config:
        if self.weights is not None and self.sampling.strata is not None:
            raise ValueError(
                "sampling.strata: sources are mixed by their own weights; leave it out, or "
                "name the URLs of all in one source and tell strata apart by their keys"
            )
        return self

    @model_validator(mode="after")
    def _sends_no_secrets(self) -> Config:
        if self.sampling.engine == "ray":
            sent = self.model_dump(include={"source": True, "sampling": {"transform_options"}})
            refuse_secrets(sent)
        return self


def refuse_secrets(values: Mapping[str, Any]) -> None:
    """Raise ValueError for settings with credentials, because Ray shows them in errors."""
    if found := list(secret_settings(values)):
        raise ValueError(
            f"{', '.join(found)}: sampling.engine: ray sends no credentials; set them in the "
            "environment of Ray's nodes instead (for S3 AWS_ACCESS_KEY_ID, …)"
        )
