"""Choose the settings of a config from the command line's options and a probe's findings."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from growcache.cli.expected_rate import rate_sentence
from growcache.cli.prove_candidate import ProbedSource
from growcache.humanize import as_size, in_bytes

EXAMPLE_URL = "s3://my-bucket/recordings/**/*.npy"
RAW_GUESS = {"dtype": "<f4", "window": 4096}
RAW_GUESS_REASON = "A guess: set dtype, shape and window to those of the recordings."


@dataclass(frozen=True, slots=True)
class ConfigChoices:
    """The settings of a config that differ from the defaults."""

    url: str = EXAMPLE_URL
    format: str = "npy"
    options: Mapping[str, Any] = field(default_factory=dict)
    storage_options: Mapping[str, Any] = field(default_factory=dict)
    cache_path: str = "./cache"
    max_bytes: str = "10GB"
    findings: Sequence[str] = ()  # sentences about the objects
    reader: str = ""  # source of a function that decodes objects, for the user to save
    bound_reason: str = ""  # explains max_bytes
    rate: str = ""  # sentence about the reachable rate
    labels: Mapping[str, Any] | None = None
    labels_findings: Sequence[str] = ()
    labels_offer: Mapping[str, Any] | None = None  # settings written as a comment
    on_missing: str = "error"
    split: Mapping[str, Any] | None = None
    split_findings: Sequence[str] = ()
    split_offer: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class InitOptions:
    url: str | None = None
    format: str | None = None
    cache_path: str | None = None
    max_bytes: str | None = None
    endpoint_url: str | None = None
    anon: bool = False
    probe: bool = True
    force: bool = False

    @property
    def storage_options(self) -> dict[str, Any]:
        endpoint = {"endpoint_url": self.endpoint_url} if self.endpoint_url else {}
        return {**endpoint, **({"anon": True} if self.anon else {})}


def propose_choices(given: InitOptions, found: ProbedSource | None) -> ConfigChoices:
    known = ConfigChoices(
        url=given.url or EXAMPLE_URL,
        format=given.format or ConfigChoices().format,
        storage_options=given.storage_options,
        cache_path=given.cache_path or ConfigChoices().cache_path,
    )
    if given.format == "raw":
        known = replace(known, options=RAW_GUESS, findings=[RAW_GUESS_REASON])
    if found and given.format in (None, found.format):
        known = replace(
            known,
            url=found.url or known.url,
            format=found.format,
            options=found.options,
            findings=found.findings,
            reader=found.reader,
        )
    if found:
        known = _with_labels_and_split(replace(known, rate=rate_sentence(found.timing)), found)
    if given.max_bytes:
        return replace(known, max_bytes=given.max_bytes)
    if given.url is None:
        return known
    folders = (Path(known.cache_path), *Path(known.cache_path).absolute().parents)
    free = shutil.disk_usage(next(folder for folder in folders if folder.is_dir())).free
    nbytes = found.nbytes if found and found.is_whole_listing else None
    bound, reason = propose_bound(free, nbytes)
    return replace(known, max_bytes=as_size(bound), bound_reason=reason)


def _with_labels_and_split(known: ConfigChoices, found: ProbedSource) -> ConfigChoices:
    """Add labels that every object has, and a split as a comment, because it leaves objects out."""
    if labels := found.labels:
        if found.all_have_labels:
            known = replace(known, labels=labels.settings, labels_findings=[labels.sentence])
        else:
            use = "To use only those objects, set labels as below, and on_missing: skip."
            findings = [labels.sentence, use]
            known = replace(known, labels_findings=findings, labels_offer=labels.settings)
    if split := found.split:
        use = "The split below holds out a fifth of them for validation."
        findings = [split.sentence, use]
        known = replace(known, split_findings=findings, split_offer=split.settings)
    return known


def propose_bound(free_bytes: int, source_bytes: int | None) -> tuple[int, str]:
    steps = [m * 10**e for e in range(6, 18) for m in (1, 2, 5)]  # 1, 2, 5, 10, … MB
    half, free = free_bytes // 2, in_bytes(free_bytes)
    if source_bytes is not None and (needed := source_bytes * 5 // 4 + 64_000_000) < half:
        reason = f"{in_bytes(source_bytes)} of objects fit completely; {free} are free"
        return next(step for step in steps if step >= needed), reason
    below = max([step for step in steps if step <= half], default=steps[0])
    return below, f"about half of the {free} that are free"
