"""The examples at the end of each command's help. Tests parse them."""

from __future__ import annotations

EXAMPLES: dict[str, tuple[str, ...]] = {
    "demo": (
        "growcache demo",
        "growcache demo --epochs 20 --keep ./demo",
        "growcache demo --notebook",
    ),
    "init": (
        "growcache init",
        "growcache init growcache.yaml --url 's3://bucket/recordings/**/*.npy'",
        "growcache init --yes --url 's3://b/*.jpg' --anon",
        "growcache init - --format raw",
    ),
    "schema": ("growcache schema",),
    "plan": (
        "growcache plan growcache.yaml --consume 400",
        "growcache plan growcache.yaml --consume 400 --link 25MB",
        "growcache plan growcache.yaml --sweep cache.max_bytes=50GB,100GB",
        "growcache plan growcache.yaml --consume 400 --json | jq .reuse",
    ),
    "run": (
        "growcache run growcache.yaml",
        "growcache run growcache.yaml --set cache.max_bytes=50GB --until-full",
        "growcache run growcache.yaml --duration 60 | jq .samples",
        "growcache run growcache.yaml --http 127.0.0.1:8650",
    ),
    "doctor": (
        "growcache doctor growcache.yaml",
        "growcache doctor growcache.yaml --consume 5000/s",
        "growcache doctor growcache.yaml --json | jq .limit",
    ),
    "status": (
        "growcache status ./cache",
        "growcache status ./cache --watch",
        "growcache status ./cache --json | jq .coverage",
    ),
    "dashboard": (
        "growcache dashboard ./cache",
        "growcache dashboard ./train ./val --http 127.0.0.1:9000",
        "growcache dashboard --grafana > growcache-dashboard.json",
        "growcache dashboard ./cache --http 0.0.0.0:8650 --token-file my.token",
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
    "replay": (
        "growcache replay growcache.yaml run.journal",
        "growcache replay growcache.yaml run.journal --step 4711",
        "growcache replay growcache.yaml run.journal --step 4711 -o b.npz",
    ),
    "report": (
        "growcache report ./cache",
        "growcache report ./cache -o run-7.html --svg ./pictures",
        "growcache report ./cache --plan plan.json",
    ),
    "export": (
        "growcache export ./cache ./copy",
        "growcache export ./cache ./copy --samples 10000 --format npy",
    ),
    "purge": (
        "growcache purge ./cache sub-17/run-2.npy s3://bucket/sub-17/run-3.npy",
        "growcache purge ./cache --keys-from withdrawn.txt --wait",
        "growcache purge ./cache --json",
    ),
    "release": ("growcache release ./cache", "growcache release ./cache --job default"),
    "explain": ("growcache explain GC401", "growcache explain"),
    "clear": ("growcache clear ./cache", "growcache clear ./cache --yes"),
}


def examples_epilog(command: str) -> str:
    """Return one paragraph for each example, because typer before 0.28 joins single lines."""
    return "\n\n".join(f"Example: {example}" for example in EXAMPLES[command])
