"""Capture the golden digests: ``python -m tests.golden [CASE ...]``; see `test_golden_shards`."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from tests.golden.capture import KNOWN, captured
from tests.golden.cases import CASES
from tests.golden.making import make
from tests.servers.web import web


def main(names: list[str]) -> None:
    """Write the digests of some cases, or of all."""
    known = json.loads(KNOWN.read_text()) if KNOWN.exists() else {}
    with tempfile.TemporaryDirectory() as work:
        objects = Path(work, "objects")
        make(objects)
        with web(objects) as address:
            for place, name in enumerate(names):
                folder = Path(work, str(place))
                folder.mkdir()
                known[name] = captured(name, objects, address, folder)
                print(name, known[name], flush=True)
    KNOWN.write_text(
        json.dumps({name: known[name] for name in CASES if name in known}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main(sys.argv[1:] or list(CASES))
