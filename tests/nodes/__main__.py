"""Run the scenarios as root: ``python -m tests.nodes [NAME ...]``; prints the figures of each."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from tests.nodes.namespaces import missing_tools
from tests.nodes.scenarios import SCENARIOS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(SCENARIOS))
    names = parser.parse_args().names or list(SCENARIOS)
    if (why := missing_tools()) is not None:
        print(why, file=sys.stderr)
        return 2
    for name in names:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="growcache-nodes-") as folder:
            figures = SCENARIOS[name](Path(folder))
        print(f"{name} ({time.monotonic() - began:.0f} s)")
        for key, value in figures.items():
            print(f"  {key}: {json.dumps(value)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
