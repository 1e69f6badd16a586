"""Surrogates by the name of `loss.name`. A new one is a function, an entry here and a class in `forgelite.config.loss`.

In every formula `r` is the ratio of the policy to its anchor, `A` the advantage, `sg` stops the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping

from forgelite.losses.surrogates.clipping import cispo, clip, dual_clip, sapo
from forgelite.losses.surrogates.likelihood import kimi, reinforce, topr
from forgelite.losses.surrogates.trust_region import dppo_kl, dppo_tv, ipo
from forgelite.losses.surrogates.whole_sequence import gmpo, gspo
from forgelite.losses.tokens import SurrogateFunction

SURROGATES: Mapping[str, SurrogateFunction] = {
    "clip": clip,
    "grpo": clip,
    "dr_grpo": clip,
    "dapo": clip,
    "decoupled_ppo": clip,
    "reinforce_plus_plus": clip,
    "reinforce": reinforce,
    "dual_clip": dual_clip,
    "cispo": cispo,
    "gspo": gspo,
    "gmpo": gmpo,
    "sapo": sapo,
    "topr": topr,
    "kimi": kimi,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "ipo": ipo,
}
