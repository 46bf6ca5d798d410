"""Child processes of growcache's own: started as ``python -m growcache …``, never by fork.

The user's script is not imported again and needs no ``__main__`` guard.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def python_path() -> dict[str, str]:
    """Return the environment in which a child imports what this process can import."""
    here = str(Path.cwd())
    paths = [path or here for path in [*sys.path, here]]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
