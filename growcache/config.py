"""The configuration: one frozen model with a section for each part of the service.

README lists the names and defaults. An unknown key is an error. `config_text` reads a configuration
from YAML, the environment and ``--set``.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Discriminator,
    Field,
    PositiveInt,
    Tag,
    TypeAdapter,
    field_validator,
    model_validator,
)

from growcache.schema import Schema
from growcache.secrecy import remember_secrets


class _ConfigModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)


def _compiled(value: str) -> re.Pattern[str]:
    try:
        return re.compile(value)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from None


def _one_or_many(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


_Texts: TypeAlias = Annotated[
    tuple[str, ...],
    BeforeValidator(_one_or_many, json_schema_input_type=str | tuple[str, ...]),
]


AUTO = "auto"  # of classes: all texts that there are, sorted


def _class_names(value: Any) -> Any:
    """Return the names of classes as texts; ``{0: …}`` and ``[0, 1]`` are numbers in YAML."""
    if isinstance(value, Mapping):
        return {str(column): _class_names(names) for column, names in value.items()}
    if not isinstance(value, list | tuple):
        return value
    if not value or any(type(name) not in (str, int) for name in value):
        raise ValueError("expected auto, or the names of classes (yes and no in quotes)")
    names = tuple(map(str, value))
    if len(set(names)) < len(names):
        raise ValueError("name no class twice")
    return names


_ClassNames: TypeAlias = Literal["auto"] | tuple[str, ...]
_GivenNames: TypeAlias = Literal["auto"] | tuple[str | int, ...]
_GivenClasses: TypeAlias = _GivenNames | dict[str, _GivenNames]


class LabelsConfig(_ConfigModel):
    """A table whose columns are added to every sample, from the row of its object.

    ``classes`` makes numbers of texts: of one column, or of those that it names.
    """

    url: Annotated[str, Field(min_length=1)]
    key: Annotated[str, Field(min_length=1)]
    columns: _Texts
    match: str = "exact"
    classes: Annotated[
        _ClassNames | dict[str, _ClassNames] | None,
        BeforeValidator(_class_names, json_schema_input_type=_GivenClasses | None),
    ] = None

    @model_validator(mode="after")
    def _classes_of_columns(self) -> LabelsConfig:
        if isinstance(self.classes, tuple) and len(self.columns) > 1:
            raise ValueError(
                f"classes: say of which column, as in {{{self.columns[-1]}: [...]}}"
            )
        unknown = set(self.classes or ()) - set(self.columns)
        if isinstance(self.classes, dict) and unknown:
            raise ValueError(f"classes: {min(unknown)!r} is none of the columns")
        return self

    @field_validator("url")
    @classmethod
    def _of_a_known_kind(cls, value: str) -> str:
        table_kind(value)
        return value

    @field_validator("columns")
    @classmethod
    def _different(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value or not all(value) or len(set(value)) < len(value):
            raise ValueError("name at least one column, and none twice")
        return value

    @field_validator("match")
    @classmethod
    def _can_be_meant(cls, value: str) -> str:
        if value in LABEL_MATCHES or "key" in _compiled(value).groupindex:
            return value
        raise ValueError(
            f"expected {', '.join(LABEL_MATCHES)}, or a regular expression with (?P<key>…)"
        )


LABEL_MATCHES = ("exact", "name", "stem")
TABLE_KINDS = ("csv", "tsv", "jsonl", "parquet")


def table_kind(url: str) -> str:
    """Return a table's kind, by the end of its name, with ``.gz`` if it is compressed, or raise ValueError.

    >>> table_kind("s3://b/labels.csv"), table_kind("https://h/labels.tsv.gz?v=1")
    ('csv', 'tsv.gz')
    """
    if kind := _kind_by_name(_name_in(url), TABLE_KINDS):
        return kind
    raise ValueError(
        f"expected a name that ends in .{', .'.join(TABLE_KINDS)}, or .gz behind one of the first three"
    )


def _name_in(url: str) -> str:
    return re.split(r"[?#]", url)[0] if re.match("https?:", url) else url


def _kind_by_name(name: str, kinds: tuple[str, ...]) -> str | None:
    packed = ".gz" if name.lower().endswith(".gz") else ""
    kind = name.lower().removesuffix(".gz").rpartition(".")[2]
    return kind + packed if kind in kinds and not (packed and kind == "parquet") else None


def _or_its_url(schema: dict[str, Any]) -> None:
    whole = dict(schema)
    schema.clear()
    schema["anyOf"] = [{"type": "string"}, whole]


MANIFEST_KINDS = ("csv", "tsv", "jsonl", "txt", "parquet")


class ManifestConfig(_ConfigModel):
    """A table of keys, with their sizes where it has them, that replaces a listing.

    ``key``, ``size`` and ``etag`` name its columns where they have other names, and ``columns`` all
    of them where the file has no line of names.
    """

    model_config = ConfigDict(json_schema_extra=_or_its_url)

    url: Annotated[str, Field(min_length=1)]
    key: str | None = None
    size: str | None = None
    etag: str | None = None
    columns: _Texts | None = None
    url_encoded: bool = False

    @model_validator(mode="before")
    @classmethod
    def _url_alone(cls, value: Any) -> Any:
        return {"url": value} if isinstance(value, str) else value

    @field_validator("url")
    @classmethod
    def _of_a_known_kind(cls, value: str) -> str:
        manifest_kind(value)
        return value


def manifest_kind(url: str) -> str:
    """Return a manifest's kind by the end of its name, with ``.gz`` if it is compressed, or raise ValueError.

    >>> manifest_kind("keys.txt"), manifest_kind("s3://inv/2024-01-01T00-00Z/manifest.json")
    ('txt', 'inventory')
    """
    name = _name_in(url)
    if name.rpartition("/")[2] == "manifest.json":
        return "inventory"
    if kind := _kind_by_name(name, MANIFEST_KINDS):
        return kind
    raise ValueError(
        f"expected a name that ends in .{', .'.join(MANIFEST_KINDS)}, or .gz behind one of the first four, "
        "or manifest.json of an S3 Inventory"
    )


PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*)\}")


class FieldConfig(_ConfigModel):
    """One of several objects that make a sample together: its URL with placeholders, and its format.

    All else is as in the source.
    """

    model_config = ConfigDict(json_schema_extra=_or_its_url)

    url: str
    format: str | None = None
    options: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _url_alone(cls, value: Any) -> Any:
        return {"url": value} if isinstance(value, str) else value

    @field_validator("url")
    @classmethod
    def _has_placeholders(cls, value: str) -> str:
        address, _, key = value.rpartition("://")
        bucket = key.partition("/")[0] if address not in ("", "file", "local") else ""
        if not PLACEHOLDER.search(value) or re.search(r"[{}]", PLACEHOLDER.sub("", value)):
            raise ValueError("expected placeholders such as {k}")
        if re.search(r"[*?\[]|::", value) or PLACEHOLDER.search(address + bucket):
            raise ValueError("expected placeholders in the key, and no wildcards or chains")
        return value

    @property
    def names(self) -> set[str]:
        """The names of the placeholders."""
        return set(PLACEHOLDER.findall(self.url))


def _field_glob(field: Any) -> str:
    url = field.get("url") if isinstance(field, Mapping) else getattr(field, "url", field)
    return PLACEHOLDER.sub("*", url) if isinstance(url, str) else "*"


DATASET_SCHEME = "dataset"


def dataset_url(maker: str) -> str:
    """Return the URL that stands for a Dataset, whose objects are its indices."""
    return f"{DATASET_SCHEME}://{maker}"


def _may_lack_url(schema: dict[str, Any]) -> None:
    del schema["required"]
    schema["anyOf"] = [
        {"required": [name]} for name in ("url", "fields", "dataset", "manifest")
    ]


class SourceConfig(_ConfigModel):
    """The URLs of the objects, and their format.

    With ``fields``, ``url`` are the globs of all fields, in their order. With ``dataset``, which
    makes a Dataset, each index is an object, and ``format`` is the maker.
    """

    model_config = ConfigDict(json_schema_extra=_may_lack_url)

    url: _Texts
    dataset: Annotated[str, Field(min_length=1)] | None = None
    names: _Texts | None = None
    fields: dict[Annotated[str, Field(min_length=1)], FieldConfig] = {}
    manifest: ManifestConfig | None = None
    labels: LabelsConfig | None = None
    on_missing: Literal["error", "skip"] = "error"
    purged: Annotated[str, Field(min_length=1)] | None = None
    format: str = "npy"
    options: dict[str, Any] = {}
    storage_options: dict[str, Any] = {}
    client: Literal["auto", "obstore", "fsspec"] = "auto"

    @model_validator(mode="before")
    @classmethod
    def _urls_of_the_fields(cls, values: Any) -> Any:
        if not isinstance(values, Mapping) or not isinstance(values.get("fields"), Mapping):
            return values
        if not values["fields"]:
            return values
        globs = [_field_glob(field) for field in values["fields"].values()]
        if "url" in values and list(values["url"]) != globs:
            raise ValueError("name url or fields, not both")
        return {**values, "url": globs}

    @model_validator(mode="before")
    @classmethod
    def _made_by_the_dataset(cls, values: Any) -> Any:
        if not isinstance(values, Mapping) or not isinstance(values.get("dataset"), str):
            return values
        maker = values["dataset"]
        own = {"url": [dataset_url(maker)], "format": maker}
        for name, value in own.items():
            if name in values and list(_one_or_many(values[name])) != list(_one_or_many(value)):
                raise ValueError(f"name dataset or {name}, not both")
        if values.get("fields") or values.get("purged") or values.get("manifest"):
            raise ValueError(
                "fields, purged and manifest need objects of a store; leave them out"
            )
        return {**values, **own}

    @model_validator(mode="after")
    def _names_of_a_dataset(self) -> SourceConfig:
        if self.names is not None and self.dataset is None:
            raise ValueError("names are those of the values of a dataset; name a dataset")
        if self.names is not None and len(set(self.names)) < len(self.names):
            raise ValueError("names: name none twice")
        return self

    @field_validator("fields")
    @classmethod
    def _alike(cls, value: dict[str, FieldConfig]) -> dict[str, FieldConfig]:
        names = [field.names for field in value.values()]
        if any(other != names[0] for other in names[1:]):
            shown = ["{" + "}, {".join(sorted(some)) + "}" for some in names]
            raise ValueError(
                f"expected the same placeholders in all, found {' and '.join(shown)}"
            )
        return value

    def format_of(self, field: str) -> tuple[str, dict[str, Any]]:
        """Return the format of a field's objects, and its options."""
        own = self.fields[field]
        form = own.format or self.format
        inherited = self.options if form == self.format else {}
        return form, inherited if own.options is None else own.options

    @property
    def formats(self) -> list[tuple[str, dict[str, Any]]]:
        """The formats of the objects, with their options: one, or that of each field."""
        return [self.format_of(name) for name in self.fields] or [(self.format, self.options)]

    @field_validator("url")
    @classmethod
    def _not_empty(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value or not all(value):
            raise ValueError("name at least one URL")
        return value


class WeightedSource(SourceConfig):
    """One of several mixed sources, and its weight."""

    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0


def _source_tag(value: Any) -> str:
    return SEVERAL_SOURCES if isinstance(value, list | tuple) else ONE_SOURCE


ONE_SOURCE, SEVERAL_SOURCES = (
    "one",
    "several",
)  # branches of ``source``, of which users need not know


_SourceSetting: TypeAlias = Annotated[
    Annotated[SourceConfig, Tag(ONE_SOURCE)]
    | Annotated[tuple[WeightedSource, ...], Tag(SEVERAL_SOURCES)],
    Discriminator(_source_tag),
]


class LabelGroup(_ConfigModel):
    """A column of the labels whose values are the groups."""

    label: str


class BlockGroup(_ConfigModel):
    """A group is a run of so many indices of a Dataset, because neighbours may be alike."""

    block: PositiveInt


class SplitConfig(_ConfigModel):
    """The share of the objects to draw from: a subset, by a hash of an object's group.

    It has its own seed, so that caches of one split that draw in other orders have no group in common.
    """

    group: str | LabelGroup | BlockGroup | None = None
    fractions: dict[str, Annotated[float, Field(gt=0, le=1)]]
    use: str
    seed: int = 0

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
        if not isinstance(value, str) or "group" in _compiled(value).groupindex:
            return value
        raise ValueError("expected (?P<group>…) around what tells groups apart")

    @field_validator("fractions")
    @classmethod
    def _of_the_whole(cls, value: dict[str, float]) -> dict[str, float]:
        if not value or (total := sum(value.values())) > 1 + 1e-9:
            raise ValueError(
                f"expected shares of 1, found {total:g} in all" if value else "name a subset"
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


class StrataConfig(_ConfigModel):
    """How often each stratum of the objects is drawn."""

    by: str
    weights: (
        Literal["balanced", "natural", "sqrt"]
        | dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]]
    ) = "balanced"

    @field_validator("by")
    @classmethod
    def _can_be_compiled(cls, value: str) -> str:
        _compiled(value)
        return value

    @field_validator("weights", mode="before")
    @classmethod
    def _named_in_text(cls, value: Any) -> Any:
        # Folders named 0, 1, … are numbers in YAML.
        return {str(k): v for k, v in value.items()} if isinstance(value, Mapping) else value


DeclaredSchema: TypeAlias = dict[str, tuple[str | int | None, ...]]  # dtype, then dimensions


def _declared_schema(value: Any) -> Any:
    """Return ``{x: [float32, null, 64], note: str}`` as dtypes of NumPy and dimensions."""
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

    class SamplingConfig(_ConfigModel):
        """How samples are drawn, and by how many processes."""

        seed: int = 0
        order: Literal["permutation", "replacement"] = "permutation"
        samples_per_object: Literal["auto"] | PositiveInt = "auto"
        weight_by: Literal["samples", "objects"] = "samples"
        shard_samples: Literal["auto"] | PositiveInt = "auto"
        schema: _SchemaSetting = "auto"  # type: ignore[assignment]
        strata: StrataConfig | None = None
        transform: str | None = None
        transform_options: dict[str, Any] = {}
        max_skipped: Annotated[float, Field(ge=0, le=1)] = 0.01
        workers: Annotated[int, Field(ge=1, le=256)] = 2
        concurrency: Annotated[int, Field(ge=1, le=4096)] = 16
        timeout_seconds: Annotated[float, Field(gt=0)] = 60.0
        max_egress: ByteSize | None = None
        max_bytes_per_second: ByteSize | None = None
        node: Annotated[int, Field(ge=0)] = 0
        nodes: PositiveInt = 1

        @model_validator(mode="after")
        def _node_exists(self) -> SamplingConfig:
            if self.node >= self.nodes:
                raise ValueError(
                    f"node {self.node} does not exist among nodes: {self.nodes} (they count from 0)"
                )
            return self


def _parse_share_or_bytes(value: Any) -> Any:
    """``"1%"`` becomes the float 0.01; everything else is a number of bytes."""
    if isinstance(value, str) and (match := re.fullmatch(r"\s*([\d.]+)\s*%\s*", value)):
        return float(match[1]) / 100
    return (
        value if isinstance(value, float) and value < 1 else _BYTE_SIZE.validate_python(value)
    )


_BYTE_SIZE = TypeAdapter(ByteSize)


class CacheConfig(_ConfigModel):
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


class Config(_ConfigModel):
    """The whole configuration; see `load_config`."""

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
            raise ValueError("expected the same on_missing in all")
        return value

    @property
    def sources(self) -> tuple[SourceConfig, ...]:
        """The source, or all sources that are mixed."""
        return self.source if isinstance(self.source, tuple) else (self.source,)

    @property
    def urls(self) -> tuple[str, ...]:
        """The URLs of all sources; a listed object has the number of its URL among these."""
        return tuple(url for source in self.sources for url in source.url)

    @property
    def weights(self) -> tuple[float, ...] | None:
        """The weights of mixed sources; None where there is one source."""
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
                "sampling.strata: sources are mixed by their own weights; leave it out, or name "
                "the URLs of all in one source and let strata be told by their keys"
            )
        return self
