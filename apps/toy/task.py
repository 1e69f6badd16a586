"""The task of the toy, without torch: prompts, demonstrations, and the reward.

A prompt is five letters and `>`. The demonstrations answer with the letters sorted (30 %), copied (35 %) or reversed
(35 %). The reward pays only for the sorted answer, ended by `<eos>`. So reinforcement learning selects one of the
behaviours that the model has; it does not teach sorting from nothing.
"""

from __future__ import annotations

import random

from forgelite.scoring.reward import RewardSample

LETTERS = "abcdefghij"
LENGTH = 5
SORTED_SHARE = 0.3


def problems(count: int, seed: int) -> list[dict[str, str]]:
    """Rows for GRPO. Example of a row: `{"prompt": "cabfd>", "answer": "abcdf"}`."""
    rng = random.Random(seed)
    return [{"prompt": f"{letters}>", "answer": "".join(sorted(letters))} for letters in _draw(count, rng)]


def demonstrations(count: int, seed: int) -> list[dict[str, str]]:
    """Rows for SFT, a mixture of the three answers. Example of a row: `{"prompt": "cabfd>", "answer": "dfbac"}`."""
    rng = random.Random(seed)
    rows = []
    for letters in _draw(count, rng):
        if rng.random() < SORTED_SHARE:
            answer = "".join(sorted(letters))
        else:
            answer = letters if rng.random() < 0.5 else letters[::-1]
        rows.append({"prompt": f"{letters}>", "answer": answer})
    return rows


def sorted_letters(sample: RewardSample) -> float:
    """1 for the sorted letters followed by the end of the sequence, else 0."""
    return float(sample.finish_reason == "stop" and sample.completion == sample.row["answer"])


def _draw(count: int, rng: random.Random) -> list[str]:
    return ["".join(rng.choice(LETTERS) for _ in range(LENGTH)) for _ in range(count)]
