"""Every loss once more, written from its formula: float64, one sequence and one token after the other.

The value comes from Python loops over numbers; the gradient from automatic differentiation of these loops. Nothing of
`forgelite.losses` is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from forgelite.config.policy_loss import PolicyLossConfig
from tests.unit.losses_batches import Sample

Number = torch.Tensor  # a float64 scalar
Numbers = list[Number]


def reference_loss(chosen: Sequence[Sample], config: PolicyLossConfig) -> tuple[float, list[torch.Tensor]]:
    """Value, and for each sequence the gradient of its log-probabilities, [T] float64."""
    leaves = [s.logprobs.double().requires_grad_() for s in chosen]
    trained = [[t for t, on in enumerate(s.mask.tolist()) if on] for s in chosen]
    policy: list[Numbers] = []
    divergence: list[Numbers] = []
    for sample, leaf, places in zip(chosen, leaves, trained, strict=True):
        now = [leaf[t] for t in places]
        sampled = [sample.behaviour.double()[t] for t in places]
        proximal = [sample.proximal.double()[t] for t in places]
        old = sampled if config.anchor == "behaviour" else proximal
        start = [x.detach() for x in now] if config.anchor == "behaviour" else proximal
        losses = SURROGATES[config.name](now, old, sampled, sample.advantage, config)
        for correction in config.corrections:
            gaps = [a - b for a, b in zip(start, sampled, strict=True)]
            factors = CORRECTIONS[correction.name](gaps, _turns(places), sample.advantage, now, sampled, correction)
            losses = [loss * float(factor) for loss, factor in zip(losses, factors, strict=True)]
        policy.append(losses)
        frozen = [sample.reference.double()[t] for t in places]
        divergence.append([DIVERGENCES[config.kl_estimator](*x) for x in zip(now, frozen, sampled, strict=True)])
    total = _aggregate(policy, config) + config.kl_coefficient * _aggregate(divergence, config)
    total.backward()
    return total.item(), [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]


def _aggregate(losses: Sequence[Numbers], config: PolicyLossConfig) -> Number:
    kept = [one for one in losses if one]  # a sequence without a trained token does not count
    if config.aggregation == "token_mean":
        return sum(x for one in kept for x in one) / sum(len(one) for one in kept)
    if config.aggregation == "sequence_mean":
        return sum(sum(one) / len(one) for one in kept) / len(kept)
    return sum(x for one in kept for x in one) / (len(kept) * config.constant_length)


def _turns(places: Sequence[int]) -> list[list[int]]:
    """Runs of neighbouring places, as indices into `places`."""
    runs: list[list[int]] = []
    for i, place in enumerate(places):
        if i and places[i - 1] == place - 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    return runs


def _mean(values: Sequence) -> Number | float:
    return sum(values) / len(values)


def _held(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


# ---- surrogates: (log pi now, log pi of the anchor, log pi that sampled, advantage, options) ----


def _reinforce(now: Numbers, old: Numbers, sampled: Numbers, advantage: float, c: PolicyLossConfig) -> Numbers:
    return [-advantage * x for x in now]


def _clip(now: Numbers, old: Numbers, sampled: Numbers, advantage: float, c: PolicyLossConfig) -> Numbers:
    out = []
    for x, y in zip(now, old, strict=True):
        ratio = (x - y).exp()
        bounded = ratio.clamp(1 - c.clip_low, 1 + c.clip_high)
        out.append(-min(ratio * advantage, bounded * advantage))
    return out


def _dual_clip(now: Numbers, old: Numbers, sampled: Numbers, advantage: float, c: PolicyLossConfig) -> Numbers:
    out = []
    for once in _clip(now, old, sampled, advantage, c):
        ceiling = torch.tensor(-c.dual_clip * advantage, dtype=torch.float64)
        out.append(min(once, ceiling) if advantage < 0 else once)
    return out


def _cispo(now: Numbers, old: Numbers, sampled: Numbers, advantage: float, c: PolicyLossConfig) -> Numbers:
    weights = [
        _held(math.exp(x.item() - y.item()), 1 - c.clip_low, 1 + c.clip_high) for x, y in zip(now, old, strict=True)
    ]
    return [-w * advantage * x for w, x in zip(weights, now, strict=True)]


def _gspo(now: Numbers, old: Numbers, sampled: Numbers, advantage: float, c: PolicyLossConfig) -> Numbers:
    if not now:
        return []
    ratio = _mean([x - y for x, y in zip(now, old, strict=True)]).exp()
    bounded = ratio.clamp(1 - c.clip_low, 1 + c.clip_high)
    return [-min(ratio * advantage, bounded * advantage)] * len(now)


def _gmpo(now: Numbers, old: Numbers, sampled: Numbers, advantage: float, c: PolicyLossConfig) -> Numbers:
    if not now:
        return []
    sign, kept = (1 if advantage > 0 else -1), []
    for x, y in zip(now, old, strict=True):
        log_ratio = x - y
        kept.append(sign * min(sign * log_ratio, sign * log_ratio.clamp(-c.clip_low, c.clip_high)))
    return [-advantage * _mean(kept).exp()] * len(now)


def _sapo(now: Numbers, old: Numbers, sampled: Numbers, advantage: float, c: PolicyLossConfig) -> Numbers:
    tau = c.tau_positive if advantage > 0 else c.tau_negative
    return [-advantage * (4 / tau) / (1 + (-tau * ((x - y).exp() - 1)).exp()) for x, y in zip(now, old, strict=True)]


def _topr(now: Numbers, old: Numbers, sampled: Numbers, advantage: float, c: PolicyLossConfig) -> Numbers:
    if advantage > 0:
        return [-c.weight_positive * advantage * x for x in now]
    weights = [min(1.0, math.exp(x.item() - y.item())) for x, y in zip(now, old, strict=True)]
    return [-c.weight_negative * w * advantage * x for w, x in zip(weights, now, strict=True)]


def _kimi(now: Numbers, old: Numbers, sampled: Numbers, advantage: float, c: PolicyLossConfig) -> Numbers:
    return [-advantage * x + c.tau / 2 * (x - y) ** 2 for x, y in zip(now, old, strict=True)]


def _dppo_tv(now: Numbers, old: Numbers, sampled: Numbers, advantage: float, c: PolicyLossConfig) -> Numbers:
    out = []
    for x, y in zip(now, sampled, strict=True):
        change = math.exp(x.item()) - math.exp(y.item())
        keep = change <= c.threshold_high if advantage > 0 else change >= -c.threshold_low
        out.append(-advantage * (x - y).exp() * keep)
    return out


def _dppo_kl(now: Numbers, old: Numbers, sampled: Numbers, advantage: float, c: PolicyLossConfig) -> Numbers:
    out = []
    for x, y in zip(now, sampled, strict=True):
        p, q = math.exp(x.item()), math.exp(y.item())
        kl = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
        drop = (advantage > 0 and p > q and kl > c.threshold_high) or (advantage < 0 and p < q and kl > c.threshold_low)
        out.append(-advantage * (x - y).exp() * (not drop))
    return out


def _ipo(now: Numbers, old: Numbers, sampled: Numbers, advantage: float, c: PolicyLossConfig) -> Numbers:
    out = []
    for x, y in zip(now, sampled, strict=True):
        keep = abs(math.exp(x.item()) - math.exp(y.item())) <= c.threshold
        out.append(-advantage * (x - y).exp() * keep + c.kl_tau * (x - y) ** 2)
    return out


SURROGATES: dict[str, Callable[..., Numbers]] = {
    **dict.fromkeys(("clip", "grpo", "dr_grpo", "dapo", "decoupled_ppo", "reinforce_plus_plus"), _clip),
    "reinforce": _reinforce,
    "dual_clip": _dual_clip,
    "cispo": _cispo,
    "gspo": _gspo,
    "gmpo": _gmpo,
    "sapo": _sapo,
    "topr": _topr,
    "kimi": _kimi,
    "dppo_tv": _dppo_tv,
    "dppo_kl": _dppo_kl,
    "ipo": _ipo,
}


# ---- corrections: (gaps, turns, advantage, log pi now, log pi that sampled, options) ----


def _one_for_all(gaps: Numbers, number: Callable[[Numbers], float]) -> list[float]:
    return [number(gaps)] * len(gaps) if gaps else []


def _in_band(weight: float, c: object) -> bool:
    return c.low <= weight <= c.high


def _segment(gaps: Numbers, turns: Sequence[Sequence[int]], cap: float) -> list[float]:
    weights = {i: min(math.exp(_mean([gaps[j].item() for j in turn])), cap) for turn in turns for i in turn}
    return [weights[i] for i in range(len(gaps))]


def _masked_importance(weights: Sequence[float], c: object) -> list[float]:
    return [w if _in_band(w, c) else 0.0 for w in weights]


def _off_policy(advantage: float, now: Numbers, sampled: Numbers, c: object) -> list[bool]:
    drift = [y.item() - x.item() for x, y in zip(now, sampled, strict=True)]
    return [advantage >= 0 or _mean(drift) <= c.threshold] * len(drift) if drift else []


CORRECTIONS: dict[str, Callable[..., list]] = {
    "token_tis": lambda gaps, turns, a, now, old, c: [min(math.exp(g), c.cap) for g in gaps],
    "sequence_tis": lambda gaps, turns, a, now, old, c: _one_for_all(gaps, lambda g: min(math.exp(sum(g)), c.cap)),
    "geometric_tis": lambda gaps, turns, a, now, old, c: _one_for_all(gaps, lambda g: min(math.exp(_mean(g)), c.cap)),
    "segment_tis": lambda gaps, turns, a, now, old, c: _segment(gaps, turns, c.cap),
    "icepop": lambda gaps, turns, a, now, old, c: _masked_importance([math.exp(g) for g in gaps], c),
    "sequence_mis": lambda gaps, turns, a, now, old, c: _masked_importance(
        _one_for_all(gaps, lambda g: math.exp(sum(g))), c
    ),
    "geometric_rejection": lambda gaps, turns, a, now, old, c: _one_for_all(
        gaps, lambda g: _in_band(math.exp(_mean(g)), c)
    ),
    "veto": lambda gaps, turns, a, now, old, c: _one_for_all(gaps, lambda g: all(math.exp(x) >= c.lowest for x in g)),
    "opsm": lambda gaps, turns, a, now, old, c: _off_policy(a, now, old, c),
}


# ---- divergence from the reference: (log pi now, log pi of the reference, log pi that sampled) ----

DIVERGENCES: dict[str, Callable[[Number, Number, Number], Number]] = {
    "k1": lambda now, frozen, sampled: now - frozen,
    "k2": lambda now, frozen, sampled: (now - frozen) ** 2 / 2,
    "k3": lambda now, frozen, sampled: (frozen - now).exp() - 1 + now - frozen,
    "k3_unbiased": lambda now, frozen, sampled: (now - sampled).exp() * ((frozen - now).exp() - 1 + now - frozen),
}
