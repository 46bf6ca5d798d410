"""Jobs of torchrun over nodes in network namespaces, with real services and one object server."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.nginx_s3 import nginx
from tests.nodes.namespaces import missing_tools
from tests.nodes.scenarios import SCENARIOS

pytestmark = [pytest.mark.slow, pytest.mark.torch]


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_job_over_nodes(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    if nginx() is None:
        pytest.skip("no nginx")
    if (why := missing_tools()) is not None:
        pytest.skip(why)
    SCENARIOS[name](tmp_path)
