"""The table of docs/reference/metrics.md, written from what the exposition says of each metric."""

from __future__ import annotations

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

EVERYWHERE, OF_BUCKETS = "cache", "le"


def metrics_markdown(exposition: str) -> str:
    """Return a row for each metric, with its type, its labels besides `cache`, and its help."""
    rows = [_row(family) for family in text_string_to_metric_families(exposition)]
    return "\n".join(
        ["| metric | type | labels | meaning |", "| --- | --- | --- | --- |", *rows]
    )


def _row(family: Metric) -> str:
    name = f"{family.name}_total" if family.type == "counter" else family.name
    labels = dict.fromkeys(label for sample in family.samples for label in sample.labels)
    shown = ", ".join(label for label in labels if label not in (EVERYWHERE, OF_BUCKETS))
    return f"| `{name}` | {family.type} | {shown} | {family.documentation} |"
