"""The process of one contestant: a command per line comes in, an answer per line goes out.

It runs in the contestant's environment, stands still between two commands, with no loader
open, and ends when its standard input does. Answers have a pipe of their own, because
libraries print.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.peers.cases import Case
from benchmarks.peers.loops import Limits, one_round

Command = dict[str, Any]


def answer(module: Any, case: Case, folder: Path, command: Command) -> Any:
    """Do what a command says."""
    if command["do"] == "write":
        module.write(case, folder)
        return None
    if command["do"] == "versions":
        return {name: metadata.version(name) for name in command["packages"]}
    make = partial(module.opened, case, folder, **command["setting"])
    return one_round(make, case, command["loop"], Limits(**command["limits"]))


def serve(do: Callable[[Command], Any], answers: Any) -> None:
    """Answer commands until there are no more."""
    for line in sys.stdin:
        try:
            reply = {"result": do(json.loads(line))}
        except Exception as error:  # noqa: BLE001, the parent reports it and goes on
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


def main() -> None:
    name, described, folder, descriptor = sys.argv[1:]
    described = json.loads(described)
    shape = described["shape"]
    case = Case(
        **{**described, "shape": shape and tuple(shape), "sizes": tuple(described["sizes"])}
    )
    with os.fdopen(int(descriptor), "w", encoding="utf-8") as answers:
        module = importlib.import_module(f"benchmarks.peers.contestants.{name}")
        answers.write(json.dumps({"result": "ready"}) + "\n")
        answers.flush()
        serve(partial(answer, module, case, Path(folder)), answers)


if __name__ == "__main__":
    main()
