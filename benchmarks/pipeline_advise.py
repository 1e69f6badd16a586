"""Which split, depth and age bound: candidates are simulated with a user's measured rates and lengths.

    python -m benchmarks.pipeline --advise --generate-tokens-per-s 40000 --train-tokens-per-s 25000 \\
        --lengths lognormal:800,1.0 --gpus 8

With `--gpus` the two rates are those of all GPUs in the one role, and are taken to grow with the number of GPUs; every
number of GPUs for generation is weighed by its bound, and the three best splits are simulated. Without `--gpus` the two
stations are as they are, and only depth and age bound are asked for.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console

from benchmarks.pipeline_lengths import Lengths
from benchmarks.pipeline_policy import Engine
from benchmarks.pipeline_simulation import Outcome, Scenario, simulate_all
from benchmarks.pipeline_stations import Rewards, Trainer
from benchmarks.pipeline_tables import LEGEND, print_outcomes

SPLITS = 3  # that are simulated
CLOSE = 0.97  # of the best tokens/s is as good, if its samples are younger
MANY = 100_000
DEPTHS_AND_BOUNDS = ((0, 0), (1, 1), (1, 2), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16))


@dataclass(kw_only=True, slots=True, frozen=True)
class Question:
    """What the user measured and wants. Example: see the head of this module."""

    generate_tokens_per_s: float  # of all GPUs, every slot taken
    train_tokens_per_s: float  # of all GPUs
    lengths: Lengths
    gpus: int | None  # None: the stations are given
    slots: int  # of all GPUs
    sequence_tokens_per_s: float | None  # of a sequence that runs alone; None: 1.5 times that in a full engine
    groups_per_step: int
    group_size: int
    reward_s: float
    max_age: int
    seconds: float  # simulated, for each candidate


@dataclass(kw_only=True, slots=True, frozen=True)
class Candidate:
    """One answer. Example: `Candidate(generating=5, depth=2, max_policy_age=4)`."""

    generating: int | None  # GPUs; None: the stations are given
    depth: int
    max_policy_age: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of a question."""
    ask = parser.add_argument_group("advise", "which split, depth and age bound")
    ask.add_argument("--advise", action="store_true", help="simulate candidates and name one")
    ask.add_argument("--generate-tokens-per-s", type=float, help="measured, of all GPUs, every decode slot taken")
    ask.add_argument("--train-tokens-per-s", type=float, help="measured, of all GPUs")
    ask.add_argument(
        "--lengths",
        default="lognormal:1000,1.0",
        help="constant:N, normal:MEAN,STD, lognormal:MEAN,SIGMA, pareto:MEAN,ALPHA or file:PATH (default: %(default)s)",
    )
    ask.add_argument("--max-length", type=int, default=32_768, help="policy.sampling.max_tokens (default: %(default)s)")
    ask.add_argument("--gpus", type=int, help="to split between the two; none given: the stations are as measured")
    ask.add_argument("--slots", type=int, default=512, help="sequences at once, all GPUs (default: %(default)s)")
    ask.add_argument("--sequence-tokens-per-s", type=float, help="of one sequence alone (default: 1.5 x a full slot's)")
    ask.add_argument("--groups-per-step", type=int, default=64, help="default: %(default)s")
    ask.add_argument("--group-size", type=int, default=8, help="default: %(default)s")
    ask.add_argument("--reward-s", type=float, default=1.0, help="to score one group (default: %(default)s)")
    ask.add_argument("--max-age", type=int, default=8, help="no age bound above this (default: %(default)s)")
    ask.add_argument("--seconds", type=float, default=1800.0, help="simulated a candidate (default: %(default)s)")


def question(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Question:
    """The question of the command line; exits with a message where it makes no sense."""
    rates = (options.generate_tokens_per_s, options.train_tokens_per_s)
    if any(rate is None or rate <= 0 for rate in rates):
        parser.error("--advise needs --generate-tokens-per-s and --train-tokens-per-s, both above 0")
    for name in ("max_length", "slots", "groups_per_step", "group_size"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)} must be at least 1")
    if options.max_age < 0 or options.reward_s < 0 or options.seconds <= 0:
        parser.error("--max-age and --reward-s must not be below 0, and --seconds must be above it")
    if options.gpus is not None and options.gpus < 2:
        parser.error(f"--gpus {options.gpus} cannot be split between generation and training")
    lengths = Lengths(text=options.lengths, longest=options.max_length)
    try:
        lengths.mean()
    except (ValueError, OSError) as error:
        parser.error(f"--lengths: {error}")
    asked = Question(
        generate_tokens_per_s=options.generate_tokens_per_s,
        train_tokens_per_s=options.train_tokens_per_s,
        lengths=lengths,
        gpus=options.gpus,
        slots=options.slots,
        sequence_tokens_per_s=options.sequence_tokens_per_s,
        groups_per_step=options.groups_per_step,
        group_size=options.group_size,
        reward_s=options.reward_s,
        max_age=options.max_age,
        seconds=options.seconds,
    )
    try:
        for candidate in candidates(asked):
            scenario(asked, candidate)
    except ValueError as error:  # the rates do not fit the slots
        parser.error(str(error))
    return asked


def advise(asked: Question, console: Console, processes: int) -> Candidate:
    """Simulate the candidates, `processes` at a time, print what each is like, name one and return it."""
    weighed = list(candidates(asked))
    outcomes = dict(zip(weighed, simulate_all([scenario(asked, c) for c in weighed], processes), strict=True))
    rows = {(*_names(asked, c), f"{o.tokens_per_s:,.0f}"): o for c, o in outcomes.items()}
    columns = (*(("generating", "training") if asked.gpus else ()), "depth", "max_policy_age", "trained tokens/s")
    print_outcomes(f"Candidates: {asked.lengths.text}, at most {asked.lengths.longest:,}", columns, rows, console)
    console.print(LEGEND, highlight=False)
    best = choose(outcomes)
    console.print(f"\n{_sentence(asked, best, outcomes[best])}", highlight=False)
    return best


def candidates(asked: Question) -> Iterator[Candidate]:
    """Every depth and bound for the splits whose bound is best."""
    splits: list[int | None] = [None]
    if asked.gpus is not None:
        splits = sorted(range(1, asked.gpus), key=lambda n: -_bound_tokens_per_s(asked, n))[:SPLITS]
    for generating in splits:
        for depth, bound in DEPTHS_AND_BOUNDS:
            if bound <= asked.max_age:
                yield Candidate(generating=generating, depth=depth, max_policy_age=bound)


def scenario(asked: Question, candidate: Candidate) -> Scenario:
    """The run that a candidate stands for."""
    generating, training = _shares(asked, candidate.generating)
    slots = max(1, round(asked.slots * generating))
    rate = asked.generate_tokens_per_s * generating
    return Scenario(
        lengths=asked.lengths,
        engine=Engine(
            slots=slots,
            tokens_per_s=rate,
            sequence_tokens_per_s=asked.sequence_tokens_per_s or 1.5 * rate / slots,
        ),
        trainer=Trainer(tokens_per_s=asked.train_tokens_per_s * training),
        rewards=Rewards(mean_s=asked.reward_s),
        loop={
            "groups_per_step": asked.groups_per_step,
            "group_size": asked.group_size,
            "depth": candidate.depth,
            "max_policy_age": candidate.max_policy_age,
            "max_groups_in_flight": MANY,
            "max_groups_queued": MANY,
        },
        seconds=asked.seconds,
    )


def choose(outcomes: dict[Candidate, Outcome]) -> Candidate:
    """Of the candidates that are close to the most tokens/s, the one that guarantees the youngest samples."""
    most = max(outcome.tokens_per_s for outcome in outcomes.values())
    close = [candidate for candidate, outcome in outcomes.items() if outcome.tokens_per_s >= CLOSE * most]
    return min(close, key=lambda c: (c.max_policy_age, c.depth, -outcomes[c].tokens_per_s))


def _shares(asked: Question, generating: int | None) -> tuple[float, float]:
    if generating is None or asked.gpus is None:
        return 1.0, 1.0
    return generating / asked.gpus, (asked.gpus - generating) / asked.gpus


def _bound_tokens_per_s(asked: Question, generating: int) -> float:
    share, rest = _shares(asked, generating)
    return min(asked.generate_tokens_per_s * share, asked.train_tokens_per_s * rest)


def _names(asked: Question, candidate: Candidate) -> tuple[str, ...]:
    split = ()
    if asked.gpus is not None and candidate.generating is not None:
        split = (str(candidate.generating), str(asked.gpus - candidate.generating))
    return (*split, str(candidate.depth), str(candidate.max_policy_age))


def _sentence(asked: Question, best: Candidate, outcome: Outcome) -> str:
    split = ""
    if asked.gpus is not None and best.generating is not None:
        split = f"{best.generating} GPUs generate, {asked.gpus - best.generating} train; "
    waiting = "generation" if outcome.trainer_idle > outcome.policy_idle else "training"
    return (
        f"Take: {split}loop.depth={best.depth} loop.max_policy_age={best.max_policy_age}\n"
        f"      {outcome.tokens_per_s:,.0f} trained tokens/s, efficiency {outcome.efficiency:.2f}, mean age "
        f"{outcome.mean_age:.2f}, {outcome.rejected_share:.1%} of samples too old; {waiting} is the slower side.\n"
        f"      Of all candidates within {1 - CLOSE:.0%} of the most tokens/s, the one with the lowest age bound."
    )
