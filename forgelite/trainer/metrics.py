"""From sums over all tokens of a step to its metrics, each computed once."""

from __future__ import annotations

from collections.abc import Mapping


def step_metrics(totals: Mapping[str, float], tokens: int) -> dict[str, float]:
    """The loss, ratio and mismatch metrics of one step.

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
        weights = totals["sum/ratio"]
        metrics |= {
            "ratio/mean": weights / tokens,
            "ratio/max": totals["max/ratio"],
            "ratio/clipped_tokens": totals["sum/clipped"],
            "ratio/clipped_fraction": totals["sum/clipped"] / tokens,
            # Kish's effective sample size as a share of the sample: (sum w)^2 / (N sum w^2)
            "ratio/ess": weights**2 / (tokens * totals["sum/ratio_squared"]),
        }
    if own := totals.get("sum/mismatch_tokens"):
        metrics |= {
            "mismatch/tokens": own,
            "mismatch/logprob_abs_mean": totals["sum/mismatch"] / own,
            "mismatch/logprob_abs_max": totals["max/mismatch"],
        }
    return metrics
