"""Distributions of the length of an answer, in tokens, written as users write them: `lognormal:2000,1.0`.

| text | what |
|---|---|
| `constant:N` | every answer has N tokens |
| `normal:MEAN,STD` | as said |
| `lognormal:MEAN,SIGMA` | the mean of the tokens, and the standard deviation of their logarithm |
| `pareto:MEAN,ALPHA` | P(length > x) = (x_min / x)^ALPHA, x_min = MEAN (ALPHA - 1) / ALPHA; ALPHA above 1 |
| `file:PATH` | drawn from measured lengths, one number a line |

A draw is cut at the longest answer, as an engine cuts it at `max_tokens`; the mean that is written is that before the
cut.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

SAMPLES_FOR_MEAN = 100_000


@dataclass(kw_only=True, slots=True, frozen=True)
class Lengths:
    """Example: `Lengths(text="lognormal:2000,1.0", longest=16384).draw(random.Random(0))`."""

    text: str
    longest: int  # tokens; a longer answer is cut there

    def sampler(self, rng: random.Random) -> Callable[[], int]:
        """A function that draws one length in [1, longest].

        Raises:
            ValueError: the text names no distribution, or gives it the wrong numbers; the message holds the text.
        """
        draw = _sampler(self.text, rng)
        return lambda: max(1, min(self.longest, round(draw())))

    def mean(self) -> float:
        """The mean after the cut, estimated from many draws."""
        return _mean(self)


@lru_cache
def _mean(lengths: Lengths) -> float:
    draw = lengths.sampler(random.Random(0))
    return math.fsum(draw() for _ in range(SAMPLES_FOR_MEAN)) / SAMPLES_FOR_MEAN


def _sampler(text: str, rng: random.Random) -> Callable[[], float]:
    name, _, rest = text.partition(":")
    if name == "file":
        measured = [float(line) for line in Path(rest).read_text(encoding="utf-8").split()]
        if not measured:
            raise ValueError(f"lengths {text!r}: the file is empty")
        return lambda: rng.choice(measured)
    count = {"constant": 1, "normal": 2, "lognormal": 2, "pareto": 2}.get(name)
    try:
        numbers = [float(part) for part in rest.split(",")]
    except ValueError:
        numbers = []
    if count is None or len(numbers) != count or numbers[0] <= 0 or (name == "pareto" and numbers[1] <= 1):
        raise ValueError(
            f"lengths {text!r}: give constant:N, normal:MEAN,STD, lognormal:MEAN,SIGMA, pareto:MEAN,ALPHA (ALPHA > 1) "
            "or file:PATH"
        )
    if name == "constant":
        return lambda: numbers[0]
    if name == "normal":
        return lambda: rng.gauss(*numbers)
    if name == "lognormal":
        mean, sigma = numbers
        return lambda: rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)
    mean, alpha = numbers
    return lambda: rng.paretovariate(alpha) * mean * (alpha - 1) / alpha
