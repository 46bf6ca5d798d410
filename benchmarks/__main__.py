"""Run the benchmarks one after the other: ``python -m benchmarks [NAME …] [--quick …]``."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def programs() -> dict[str, str]:
    """Map the name of each benchmark to the first line of its docstring.

    A benchmark is a file with a ``main`` that takes ``--quick``.
    """
    found = {}
    for path in sorted(HERE.glob("[a-z]*.py")):
        text = path.read_text(encoding="utf-8")
        if "\ndef main(" in text and ("benchmarks.measure import" in text or "--quick" in text):
            found[path.stem] = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    return found


def main() -> int:
    known = programs()
    chosen = [word for word in sys.argv[1:] if word in known] or list(known)
    options = [word for word in sys.argv[1:] if word not in known]
    if "--help" in options or "-h" in options:
        print(__doc__)
        for name, line in known.items():
            print(f"  {name:15} {line}")
        print("Options are passed to every benchmark; see: python -m benchmarks.NAME --help")
        return 0
    failed = []
    for name in chosen:
        print(f"== {name} {' '.join(options)}", flush=True)
        if subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *options]).returncode:
            failed.append(name)
    if failed:
        print(f"did not finish: {', '.join(failed)}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
