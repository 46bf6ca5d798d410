"""The predicted worth of the samples of E3's arms, and whether accuracy ranks the arms in the same order."""

from __future__ import annotations

import re

import numpy as np
from scipy.stats import spearmanr

from benchmarks.accuracy.results import Curves, figures_of, final_metrics
from benchmarks.accuracy.statistics import visit_worth

TASK = "digits by class"
CORRELATION = 0.214  # ρ, as `hard_case.correlation_in_class` says of the digits


def predicted_worths(curves: Curves) -> dict[str, float]:
    """Return n / (1 + (k − 1) ρ) of each arm that deals its visits; n are the effective samples."""
    found: dict[str, list[float]] = {}
    for run, rows in curves.items():
        if at := re.fullmatch(r"visits of (\d+), \w+", run.arm):
            effective = figures_of(rows)["ess_samples"]
            worth = visit_worth(effective, int(at[1]), CORRELATION)
            found.setdefault(run.arm, []).append(worth)
    return {arm: float(np.mean(worths)) for arm, worths in found.items()}


def rank_correlation(curves: Curves) -> float:
    """Return Spearman's rank correlation of predicted worth and measured accuracy, over the arms."""
    metrics = final_metrics(curves, TASK)
    worths = predicted_worths(curves)
    measured = [float(np.mean(list(metrics[arm].values()))) for arm in worths]
    return float(spearmanr(list(worths.values()), measured).statistic)
