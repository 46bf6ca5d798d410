"""Prices of reading from stores: a table in the package, or the user's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from growcache.errors import ConfigError

GB = 1e9
OWN = "own"  # provider of a price in a user's file
PROVIDERS = {".amazonaws.com": "aws", ".googleapis.com": "google"}
NUMBERS = ("egress_per_gb", "retrieval_per_gb", "per_1000_get", "per_1000_list")


@dataclass(frozen=True, slots=True)
class Price:
    """US dollars for one storage class in one region."""

    provider: str
    region: str
    storage_class: str
    egress_per_gb: float
    per_1000_get: float
    per_1000_list: float = 0.0
    retrieval_per_gb: float = 0.0
    seen: str = ""  # date of the source; empty: not verified
    source: str = ""  # URL of a page or a price list

    @property
    def name(self) -> str:
        return f"{self.region}/{self.storage_class}"

    @property
    def standing(self) -> str:
        """How reliable the price is, in words."""
        if self.seen:
            return f"seen {self.seen}"
        return "your own" if self.provider == OWN else "commonly quoted, not verified"

    def to_json(self, basis: str) -> dict[str, str | float]:
        return {**asdict(self), "basis": basis, "standing": self.standing}

    def dollars(self, egress_bytes: float, requests: float, lists: float = 0.0) -> float:
        """Return the cost of reads.

        >>> Price("p", "r", "c", 0.09, 0.0004).dollars(1e12, 1e6)
        90.4
        """
        per_gb = self.egress_per_gb + self.retrieval_per_gb
        return (
            egress_bytes / GB * per_gb
            + requests / 1000 * self.per_1000_get
            + lists / 1000 * self.per_1000_list
        )


def known_prices() -> list[Price]:
    text = files("growcache.monitor").joinpath("prices.yaml").read_text(encoding="utf-8")
    return _prices(yaml.safe_load(text), "prices.yaml")


def find_price(wanted: str) -> Price:
    """Return the price of ``REGION/CLASS``, or the first one in a YAML file.

    Raises:
        ConfigError: There is no such price.
    """
    if wanted.endswith((".yaml", ".yml")):
        path = Path(wanted)
        try:
            return _prices(yaml.safe_load(path.read_text(encoding="utf-8")), wanted)[0]
        except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"--price: cannot read {wanted}: {error}", code="GC105") from None
    prices = known_prices()
    for price in prices:
        if wanted in (price.name, f"{price.provider}/{price.name}"):
            return price
    names = ", ".join(price.name for price in prices)
    raise ConfigError(
        f"--price: expected REGION/CLASS or a YAML file, found {wanted!r}; known are {names}",
        code="GC105",
    )


def usual_price(addresses: Sequence[str | None]) -> Price | None:
    """Return the price of a provider's usual region, from the stores' addresses.

    It is None if no provider is known.

    >>> usual_price(["https://bucket.s3.amazonaws.com"]).provider
    'aws'
    >>> usual_price(["http://minio:9000"])
    """
    providers = {_provider(address) for address in addresses}
    if len(providers) != 1 or (provider := providers.pop()) is None:
        return None
    return next(price for price in known_prices() if price.provider == provider)


def _provider(address: str | None) -> str | None:
    host = urlsplit(address or "").hostname or ""
    return next((name for domain, name in PROVIDERS.items() if host.endswith(domain)), None)


def _prices(rows: Any, label: str) -> list[Price]:
    rows = rows if isinstance(rows, list) else [rows]
    found = [_price(row, label) for row in rows]
    if not found:
        raise ConfigError(f"{label}: expected a price, found none", code="GC105")
    return found


def _price(row: Any, label: str) -> Price:
    if not isinstance(row, dict):
        raise ConfigError(
            f"{label}: expected mappings with egress_per_gb and per_1000_get", code="GC105"
        )
    values = {"provider": OWN, "region": OWN, "class": OWN, **row}
    for name in NUMBERS:
        number = values.get(name, 0.0)
        if isinstance(number, bool) or not isinstance(number, int | float) or number < 0:
            raise ConfigError(
                f"{label}: {name}: expected US dollars, found {number!r}", code="GC105"
            )
    if missing := [name for name in ("egress_per_gb", "per_1000_get") if name not in values]:
        raise ConfigError(f"{label}: a price lacks {' and '.join(missing)}", code="GC105")
    texts = {
        name: str(values.get(name, "")) for name in ("provider", "region", "seen", "source")
    }
    numbers = {name: float(values.get(name, 0)) for name in NUMBERS}
    return Price(storage_class=str(values["class"]), **texts, **numbers)  # type: ignore[arg-type]
