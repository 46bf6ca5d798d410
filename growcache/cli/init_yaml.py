"""Values as a config has them: YAML in one line."""

from __future__ import annotations

import math

import yaml


def as_yaml(value: object) -> str:
    text = yaml.safe_dump(
        value, default_flow_style=True, width=math.inf, allow_unicode=True, sort_keys=False
    )
    return text.removesuffix("...\n").rstrip("\n")  # a plain \xa0 is no space to YAML
