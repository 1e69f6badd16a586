"""From sums over all tokens of a step to its metrics, each computed once."""

from __future__ import annotations

from collections.abc import Mapping


def step_metrics(totals: Mapping[str, float], tokens: int) -> dict[str, float]:
    """The loss, ratio, correction and mismatch metrics of one step.

    A rate stands beside its numerator (`ratio/clipped_tokens`, over `tokens/trained`) or its denominator
    (`mismatch/tokens`), so that several steps can be averaged correctly.

    Args:
        totals: `sum/<name>` and `max/<name>` over all ranks, as the losses give them.
        tokens: Trained tokens in the batch.
    """
    metrics = {"tokens/trained": float(tokens)}
    for name in ("policy", "kl_ref", "cross_entropy"):  # the losses divide these themselves
        if f"sum/{name}" in totals:
            metrics[f"loss/{name}"] = totals[f"sum/{name}"]
    if "sum/entropy" in totals:
        metrics["loss/entropy"] = totals["sum/entropy"] / tokens
    if "sum/ratio" in totals:
        metrics |= {
            "ratio/mean": totals["sum/ratio"] / tokens,
            "ratio/max": totals["max/ratio"],
            "ratio/clipped_tokens": totals["sum/clipped"],
            "ratio/clipped_fraction": totals["sum/clipped"] / tokens,
            "ratio/ess": _effective_share(totals["sum/ratio"], totals["sum/ratio_squared"], tokens),
        }
    return metrics | _correction_metrics(totals, tokens) | _mismatch_metrics(totals)


def _correction_metrics(totals: Mapping[str, float], tokens: int) -> dict[str, float]:
    if "sum/correction/weight" not in totals:
        return {}
    weight = totals["sum/correction/weight"]
    metrics = {
        "correction/weight_mean": weight / tokens,
        "correction/weight_max": totals["max/correction/weight"],
        "correction/ess": _effective_share(weight, totals["sum/correction/weight_squared"], tokens),
    }
    for name, count in totals.items():
        # sum/correction/<name>/masked and .../truncated
        prefix, _, what = name.rpartition("/")
        if name.startswith("sum/correction/") and what in ("masked", "truncated"):
            key = prefix.removeprefix("sum/")
            metrics |= {f"{key}/{what}_tokens": count, f"{key}/{what}_fraction": count / tokens}
    return metrics


def _mismatch_metrics(totals: Mapping[str, float]) -> dict[str, float]:
    metrics = {}
    if own := totals.get("sum/mismatch_tokens"):
        metrics |= {
            "mismatch/tokens": own,
            "mismatch/logprob_abs_mean": totals["sum/mismatch"] / own,
            "mismatch/logprob_abs_max": totals["max/mismatch"],
        }
    for name, count in totals.items():
        if name.startswith("sum/gap_tokens/") and count:
            age = name.removeprefix("sum/gap_tokens/")
            metrics |= {
                f"mismatch/age_{age}/kl": totals[f"sum/gap_kl/{age}"] / count,
                f"mismatch/age_{age}/tokens": count,
            }
    return metrics


def _effective_share(weight: float, weight_squared: float, tokens: int) -> float:
    """Kish's effective sample size as a share of the sample, (sum w)^2 / (N sum w^2); 0 when nothing has weight."""
    return weight**2 / (tokens * weight_squared) if weight_squared else 0.0
