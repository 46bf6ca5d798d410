"""A test is worth something if it fails where its rule is broken; here rules are broken.

Each rule of the protocol between processes has a mutation of the source, in a marker on the
test that must notice it::

    @pytest.mark.mutant(29, "growcache.sampling.serve:serve", "_joins(config)", "False")

The marker names the rule and a symbol, then quotes what is replaced and its replacement:

- The symbol is `module:qualname`: a function, a method, a class or a constant. A function inside
  another one is `outer.inner`.
- Each piece is an expression, one or several statements, or a keyword argument such as
  `daemon=True`. It is compared as a syntax tree, so layout, comments and docstrings do not matter.
- The old piece occurs exactly once inside the symbol. Choose the smallest one that says what is
  broken, because a rename of anything in it breaks the marker.
- An empty new piece removes statements.
- An `except` clause is switched off by replacing its type with `()`.
- A string, such as an SQL statement, is quoted whole: `'"SELECT 1"'` becomes `'"SELECT 2"'`.

`python -m tests.mutants` (`make mutants`) applies each to a copy of the project and runs that
one test, which must pass without it and fail with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.mutants.editing import edited

ROOT = Path(__file__).parents[2]

# What each rule says, in a few words. Numbers are those of the markers.
RULES = {
    1: "the catalog is append-only, and editions continue one another",
    2: "what is permuted is parts, so that long recordings are visited more often",
    3: "a keyed permutation gives the order; nodes draw disjoint parts",
    4: "the fingerprint covers all that can change a byte",
    5: "transforms get generators that depend on the draw alone",
    6: "transient failures are tried again, permanent ones are holes",
    7: "the first shards are small",
    8: "shards describe themselves, and the highest number issued survives the index",
    9: "one pure function decides about permits, and names what is awaited",
    10: "what is written was reserved, at its exact size, and allocated first",
    11: "a bound that cannot hold the groups in flight is refused",
    12: "the bound counts allocated blocks, and the log keeps within its budget",
    13: "a ballast lets evictions through on a full disk",
    14: "commit and evict keep an order that a crash may cut anywhere",
    15: "readers open the index anew for each read",
    16: "order is by commit sequence, durations by the monotonic clock",
    17: "a lease is locked and filled before anybody sees it, and the index read after it",
    18: "a mapped shard stays protected, and a read one counts as used",
    19: "readers leave the unlinking of leases to a living supervisor",
    20: "a lease ends by close, and a forked child holds none",
    21: "shards are retired ahead, so that a full cache is refreshed",
    22: "TensorFlow's shards are counted as they are delivered, not as they are asked for",
    23: "reuse is tested before a snapshot is taken; contradictory limits are refused",
    24: "shards that a lease wishes for are drawn first, and checked",
    25: "a loader has at most two leases, and who holds eviction back is named",
    26: "the ranks of a job read one snapshot and make equal numbers of steps",
    27: "children have a session of their own and ignore Ctrl-C",
    28: "samplers end with their supervisor, and only the current permit is believed",
    29: "only flock decides who lives; a service on the same cache is joined",
    30: "network file systems are refused",
    31: "objects in the purge list are in no shard, and never drawn",
    32: "what a step saw is on file before the loop gets it",
}


@dataclass(frozen=True)
class Mutant:
    """One mutation of the source.

    Attributes:
        rule: that it breaks.
        symbol: where, as `module:qualname`.
        old: a piece of Python that occurs there exactly once.
        new: takes its place.
        test: that must fail, as pytest names it.
    """

    rule: int
    symbol: str
    old: str
    new: str
    test: str

    def file(self, root: Path = ROOT) -> Path:
        """Return the file of the module."""
        module = root.joinpath(*self.symbol.partition(":")[0].split("."))
        return module / "__init__.py" if module.is_dir() else module.with_suffix(".py")

    def source(self, root: Path = ROOT) -> str:
        """Return the mutated text of the file.

        Raises:
            ValueError: there is no such symbol, the old piece is not there exactly once, or
                the new one cannot replace it.
        """
        module, _, qualname = self.symbol.partition(":")
        try:
            if not self.file(root).is_file():
                raise ValueError(f"there is no module {module}")
            text = self.file(root).read_text(encoding="utf-8")
            return edited(text, qualname, self.old, self.new)
        except ValueError as error:
            raise ValueError(
                f"rule {self.rule}, {self.symbol}: {error}; change the marker on {self.test}"
            ) from error
