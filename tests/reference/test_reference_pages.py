"""What docs/reference/ says of keys is what the code has; `pytest --write-tables` writes it anew."""

from __future__ import annotations

from pathlib import Path

from growcache.cache.status_model import LeaseStatus, Status, WorkerStatus
from growcache.cli.config_schema import config_schema
from growcache.monitor.prometheus import exposition
from tests.monitor.test_metrics import full_metrics
from tests.reference.configuration import configuration_markdown
from tests.reference.metrics import metrics_markdown
from tests.tables import DOCS

END = "<!-- end -->"


def hold(page: str, name: str, text: str, *, writes: bool) -> None:
    """Compare what stands between the marks of a page, or write it there."""
    path = DOCS / "reference" / page
    whole = path.read_text(encoding="utf-8")
    head, begin, rest = whole.partition(f"<!-- written by pytest --write-tables: {name} -->\n")
    written, _, tail = rest.partition(END)
    assert begin, f"docs/reference/{page} has no place for {name}"
    if writes:
        path.write_text(f"{head}{begin}\n{text}\n{END}{tail}", encoding="utf-8")
    else:
        assert written == f"\n{text}\n", "write it anew with: pytest --write-tables"


def test_every_key_of_a_configuration(write_tables: bool) -> None:
    text = configuration_markdown(config_schema())
    hold("configuration.md", "configuration", text, writes=write_tables)


def test_every_metric(tmp_path: Path, write_tables: bool) -> None:
    lease = LeaseStatus("n", "train", "gpu7", 777, "train.py", 72.0, 350, open=True)
    sampler = WorkerStatus(0, 4712, "reading", "p-512", 150, 256, "node-7")
    status = Status(
        path=str(tmp_path),
        coverage=0.5,
        population_samples=9.0,
        updated_at=1.0,
        leases=[lease],
        worker_states=[sampler],
    )
    exposed = exposition({"c": lambda: (status, full_metrics())}, "")[0].decode()
    hold("metrics.md", "metrics", metrics_markdown(exposed), writes=write_tables)
