"""The examples that ``--help`` shows: every one of them is executed by a test."""

from __future__ import annotations

EXAMPLES: dict[str, tuple[str, ...]] = {
    "demo": (
        "growcache demo",
        "growcache demo --epochs 20 --keep ./demo",
    ),
    "init": (
        "growcache init",
        "growcache init growcache.yaml --url 's3://bucket/recordings/**/*.npy'",
        "growcache init --yes --url 's3://b/*.jpg' --anon",
        "growcache init - --format raw",
    ),
    "run": (
        "growcache run growcache.yaml",
        "growcache run growcache.yaml --set cache.max_bytes=50GB --until-full",
        "growcache run growcache.yaml --duration 60 | jq .samples",
    ),
    "status": (
        "growcache status ./cache",
        "growcache status ./cache --watch",
        "growcache status ./cache --json | jq .coverage",
    ),
    "check": (
        "growcache check ./cache",
        "growcache check ./cache --repair",
        "growcache check ./cache --json",
    ),
    "peek": (
        "growcache peek ./cache",
        "growcache peek ./cache --sample 12:0",
        "growcache peek ./cache --sample 12:0 --refetch --config my.yaml",
    ),
    "export": (
        "growcache export ./cache ./copy",
        "growcache export ./cache ./copy --samples 10000 --format npy",
    ),
    "release": ("growcache release ./cache", "growcache release ./cache --job default"),
    "clear": ("growcache clear ./cache", "growcache clear ./cache --yes"),
}


def epilog(command: str) -> str:
    """Return a command's examples as the end of its help, one per line."""
    return "\n".join(f"Example: {example}" for example in EXAMPLES[command])
