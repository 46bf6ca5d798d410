"""The configuration of a source: the place of its objects, and the settings that belong to them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)


class ConfigModel(BaseModel):
    """A section of the configuration: frozen, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)


def compiled(value: str) -> re.Pattern[str]:
    """Compile a regular expression; the ValueError of a wrong one explains it."""
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


AUTO = "auto"  # value of classes: all texts of the column, sorted


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


class LabelsConfig(ConfigModel):
    """A table whose columns are added to every sample, from the row of the sample's object.

    ``classes`` replaces texts by numbers, in one column or in the columns that it names.
    """

    url: Annotated[str, Field(min_length=1)] = Field(
        description="The table: a .csv, .tsv, .jsonl or .parquet file, by a path or a URL."
    )
    key: Annotated[str, Field(min_length=1)] = Field(
        description="The column that says to which object a row belongs."
    )
    columns: _Texts = Field(description="The columns that become fields of each sample.")
    match: str = Field(
        default="exact",
        description="The content of the column `key`: the object's key (exact), its last part (name), "
        "that part without its extension (stem), or the match of (?P<key>...) of a regular expression.",
    )
    classes: Annotated[
        _ClassNames | dict[str, _ClassNames] | None,
        BeforeValidator(_class_names, json_schema_input_type=_GivenClasses | None),
    ] = Field(
        default=None,
        description="Columns whose texts become numbers: {COLUMN: auto}, {COLUMN: [NAME, NAME]}, or auto for all.",
    )

    @model_validator(mode="after")
    def _classes_of_columns(self) -> LabelsConfig:
        if isinstance(self.classes, tuple) and len(self.columns) > 1:
            raise ValueError(f"classes: name the column, as in {{{self.columns[-1]}: [...]}}")
        unknown = set(self.classes or ()) - set(self.columns)
        if isinstance(self.classes, dict) and unknown:
            raise ValueError(f"classes: {min(unknown)!r} is not one of the columns")
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
            raise ValueError("name at least one column, and each only once")
        return value

    @field_validator("match")
    @classmethod
    def _can_be_meant(cls, value: str) -> str:
        if value in LABEL_MATCHES or "key" in compiled(value).groupindex:
            return value
        raise ValueError(
            f"expected {', '.join(LABEL_MATCHES)}, or a regular expression with (?P<key>…)"
        )


LABEL_MATCHES = ("exact", "name", "stem")
TABLE_KINDS = ("csv", "tsv", "jsonl", "parquet")


def table_kind(url: str) -> str:
    """Return a table's kind from the end of its name, with ``.gz`` if it is compressed.

    Raises:
        ValueError: The name has none of the known endings.

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


class ManifestConfig(ConfigModel):
    """A table of keys, and optionally of sizes, that replaces a listing.

    ``key``, ``size`` and ``etag`` name its columns if their names differ. ``columns`` names all
    columns if the file has no header line.
    """

    model_config = ConfigDict(json_schema_extra=_or_its_url)

    url: Annotated[str, Field(min_length=1)] = Field(
        description="The table: a .csv, .tsv, .jsonl, .txt or .parquet file, or the manifest.json of an S3 Inventory."
    )
    key: str | None = Field(
        default=None, description="The column of keys (default: key, path or url)."
    )
    size: str | None = Field(
        default=None, description="The column of sizes in bytes (default: size)."
    )
    etag: str | None = Field(
        default=None, description="The column of versions (default: etag)."
    )
    columns: _Texts | None = Field(
        default=None,
        description="The names of all columns, for a table whose first line has none.",
    )
    url_encoded: bool = Field(
        default=False, description="Whether keys are encoded as in a URL."
    )

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
    """Return a manifest's kind from the end of its name, with ``.gz`` if it is compressed.

    Raises:
        ValueError: The name has none of the known endings.

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


class FieldConfig(ConfigModel):
    """One of several objects that form a sample together: its URL with placeholders, and its format.

    All other settings are those of the source.
    """

    model_config = ConfigDict(json_schema_extra=_or_its_url)

    url: str = Field(description="The URL with placeholders, such as s3://b/train_x_{k}.npy.")
    format: str | None = Field(
        default=None, description="The format of these objects (default: source.format)."
    )
    options: dict[str, Any] | None = Field(
        default=None,
        description="Options of the format (default: source.options, if the format is the same).",
    )

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
        """Names of the placeholders."""
        return set(PLACEHOLDER.findall(self.url))


def _field_glob(field: Any) -> str:
    url = field.get("url") if isinstance(field, Mapping) else getattr(field, "url", field)
    return PLACEHOLDER.sub("*", url) if isinstance(url, str) else "*"


DATASET_SCHEME = "dataset"


def dataset_url(maker: str) -> str:
    """Return the URL that represents a Dataset, whose objects are its indices."""
    return f"{DATASET_SCHEME}://{maker}"


def _may_lack_url(schema: dict[str, Any]) -> None:
    del schema["required"]
    schema["anyOf"] = [
        {"required": [name]} for name in ("url", "fields", "dataset", "manifest")
    ]


class SourceConfig(ConfigModel):
    """The URLs of the objects, and their format.

    With ``fields``, ``url`` has the globs of all fields in their order. With ``dataset``, which
    makes a Dataset, each index is an object, and ``format`` is the maker.
    """

    model_config = ConfigDict(json_schema_extra=_may_lack_url)

    url: _Texts
    dataset: Annotated[str, Field(min_length=1)] | None = None
    names: _Texts | None = None
    fields: dict[Annotated[str, Field(min_length=1)], FieldConfig] = {}
    manifest: ManifestConfig | None = None
    catalog: Annotated[str, Field(min_length=1)] | None = None
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
        if any(map(values.get, ("fields", "purged", "manifest", "catalog"))):
            raise ValueError(
                "fields, purged, manifest and catalog need objects of a store; leave them out"
            )
        return {**values, **own}

    @model_validator(mode="after")
    def _names_of_a_dataset(self) -> SourceConfig:
        if self.names is not None and self.dataset is None:
            raise ValueError("names are those of the values of a dataset; name a dataset")
        if self.names is not None and len(set(self.names)) < len(self.names):
            raise ValueError("names: name each only once")
        return self

    @model_validator(mode="after")
    def _listed_in_one_way(self) -> SourceConfig:
        if self.catalog is not None and self.manifest is not None:
            raise ValueError("name manifest or catalog, not both: a manifest is not listed")
        if self.catalog is not None and re.search(r"[*?\[]", self.catalog):
            raise ValueError("catalog: expected a folder, found a wildcard")
        return self

    @field_validator("fields")
    @classmethod
    def _alike(cls, value: dict[str, FieldConfig]) -> dict[str, FieldConfig]:
        names = [field.names for field in value.values()]
        if any(other != names[0] for other in names[1:]):
            shown = ["{" + "}, {".join(sorted(some)) + "}" for some in names]
            raise ValueError(
                f"expected the same placeholders in all fields, found {' and '.join(shown)}"
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
        """Return the format of the objects with its options, or those of each field."""
        return [self.format_of(name) for name in self.fields] or [(self.format, self.options)]

    @field_validator("url")
    @classmethod
    def _not_empty(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value or not all(value):
            raise ValueError("name at least one URL")
        return value


class WeightedSource(SourceConfig):
    """One of several mixed sources, and its weight."""

    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        default=1.0, description="The share of the draws, relative to the other sources."
    )
