"""Two web servers: one that sends its clients on, and one that notes what it was told."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.servers.threads import Handler, in_threads


@dataclass
class Server:
    """A running server.

    Attributes:
        address: of it.
        files: what it holds, by path.
        pages: index pages, by path; else those of a folder name its files.
        moved: where it sends those who ask for a path, or for what is below it.
        needs: headers without which it answers 401.
        asked: method, path and headers of every request.
    """

    address: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict)
    pages: Mapping[str, str] = field(default_factory=dict)
    moved: dict[str, str] = field(default_factory=dict)
    needs: Mapping[str, str] = field(default_factory=dict)
    asked: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)


class _Handler(Handler):
    state: Server

    def do_GET(self) -> None:
        state = self.state
        told = {name.lower(): value for name, value in self.headers.items()}
        state.asked.append((self.command, self.path, told))
        for below, place in state.moved.items():
            if self.path.startswith(below):
                self.answer(302, b"", {"Location": place + self.path.removeprefix(below)})
                return
        if any(told.get(name) != value for name, value in state.needs.items()):
            self.answer(401, b"no")
        elif self.path.endswith("/"):
            here = [path.removeprefix(self.path) for path in state.files]
            links = "".join(f'<a href="{name}">{name}</a>' for name in here)
            links = state.pages.get(self.path, links)
            self.answer(200, links.encode(), {"Content-Type": "text/html"})
        elif self.path not in state.files:
            self.answer(404, b"no")
        else:
            self.answer_object(state.files[self.path], {"ETag": '"e"'})

    do_HEAD = do_GET


@contextlib.contextmanager
def serving(**members: Any) -> Iterator[Server]:
    """A server in threads of this process; see `Server` for its members."""
    state = Server(**members)
    with in_threads(_Handler, state=state) as state.address:
        yield state
