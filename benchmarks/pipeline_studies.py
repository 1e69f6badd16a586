"""What `benchmarks.pipeline` simulates: one base scenario, and studies that vary one or two of its numbers.

The base is a station of each kind, balanced: both handle 10,000 tokens a second. A step takes 64 groups of 8, the
engine has 128 slots, a quarter of that, so every slot serves four answers a step. A sequence alone is sampled at 120
tokens/s, at 78 where every slot is taken. Larger runs are this one with every number but the lengths, and the tokens/s
of a sequence, multiplied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.pipeline_lengths import Lengths
from benchmarks.pipeline_policy import Engine
from benchmarks.pipeline_simulation import Scenario
from benchmarks.pipeline_stations import Rewards, Trainer

HOUR_S = 3600.0
RATE = 10_000.0  # tokens/s of either station
LOGNORMAL = Lengths(text="lognormal:1000,1.0", longest=16_384)
TAIL = Lengths(text="pareto:2000,1.5", longest=32_768)  # one answer in 350 reaches 32k tokens
STEADY = Lengths(text="normal:1000,100", longest=16_384)
AGE_BOUND = 4
MANY = 100_000  # more groups than any of the studies has

Label = tuple[str, ...]


@dataclass(kw_only=True, slots=True, frozen=True)
class Study:
    """Scenarios that are shown in one table.

    Example: `Study(name="slots", title="Slots", columns=("slots",), rows={("64",): base(slots=64)})`.
    """

    name: str
    title: str
    columns: tuple[str, ...]  # names of the parts of a label
    rows: Mapping[Label, Scenario]


def base(
    *,
    lengths: Lengths = LOGNORMAL,
    slots: int = 128,
    recompute_tokens_per_s: float | None = None,
    rewards: Rewards | None = None,
    seconds: float = HOUR_S,
    scale: float = 1.0,
    training: float = 1.0,
    **loop: Any,
) -> Scenario:
    """The base scenario with some numbers changed.

    `scale` multiplies both stations, `training` the trainer's rate alone; `loop` are keys of LoopConfig.
    """
    return Scenario(
        lengths=lengths,
        engine=Engine(
            slots=round(slots * scale),
            tokens_per_s=RATE * scale,
            sequence_tokens_per_s=max(120.0, 1.1 * RATE / slots),
            recompute_tokens_per_s=recompute_tokens_per_s,
        ),
        trainer=Trainer(tokens_per_s=RATE * scale * training),
        rewards=rewards or Rewards(),
        seconds=seconds,
        loop={"groups_per_step": 64, "max_groups_queued": MANY, "max_policy_age": AGE_BOUND, **loop},
    )


def goals(seconds: float) -> Study:
    """The scenarios behind the cases with a goal."""
    return Study(
        name="goals",
        title="Behind the cases",
        columns=("scenario",),
        rows={
            ("efficiency_depth2",): base(depth=2, seconds=seconds),
            ("rejected_share_paced",): base(lengths=STEADY, depth=2, max_policy_age=2, seconds=seconds),
            ("tail, asynchronous",): base(lengths=TAIL, depth=4, max_policy_age=8, seconds=seconds),
            ("tail, synchronous",): base(lengths=TAIL, depth=0, max_policy_age=0, seconds=seconds / 4),
            ("tail, synchronous, all GPUs in turn",): base(
                lengths=TAIL, depth=0, max_policy_age=0, seconds=seconds / 4, scale=2.0
            ),
        },
    )


def controller() -> Scenario:
    """10,000 groups of 8 in flight, the answers of 2,500 of them running."""
    return Scenario(
        lengths=LOGNORMAL,
        engine=Engine(slots=20_000, tokens_per_s=1e6, sequence_tokens_per_s=100),
        trainer=Trainer(tokens_per_s=1e6),
        seconds=1.0,
        loop={
            "groups_per_step": 1000,
            "depth": None,
            "max_policy_age": 16,
            "max_groups_in_flight": 10_000,
            "max_groups_queued": MANY,
        },
    )


def depth_and_selection(seconds: float) -> Study:
    """How far to run ahead, and in which order to train."""
    rows: dict[Label, Scenario] = {("0", "any"): base(depth=0, seconds=seconds / 4)}
    for depth in (1, 2, 4, None):
        for selection in ("fifo", "windowed", "freshest"):
            if (depth, selection) != (None, "fifo"):  # refused: an unbounded stream has no line to wait in
                label = ("null" if depth is None else str(depth), selection)
                rows[label] = base(depth=depth, selection=selection, seconds=seconds)
    return Study(
        name="depth_and_selection",
        title=f"Depth and selection order: {LOGNORMAL.text}, loop.max_policy_age={AGE_BOUND}",
        columns=("depth", "selection"),
        rows=rows,
    )


def age_bound(seconds: float) -> Study:
    """How old a sample may be, and what goes when it is older."""
    return Study(
        name="age_bound",
        title=f"Age bound at depth 2: {LOGNORMAL.text}",
        columns=("max_policy_age", "on_stale"),
        rows={
            (str(bound), on_stale): base(depth=2, max_policy_age=bound, on_stale=on_stale, seconds=seconds)
            for bound in (1, 2, 3, 4, 6)
            for on_stale in ("drop_sample", "mask_tokens")
        },
    )


def slow_trainer(seconds: float) -> Study:
    """Where generation could be faster than training, it runs as far ahead as it may."""
    rows: dict[Label, Scenario] = {}
    for depth in (1, 2, 4, None):
        for selection in ("windowed", "freshest"):
            label = ("null" if depth is None else str(depth), selection)
            rows[label] = base(depth=depth, selection=selection, training=0.7, seconds=seconds)
    return Study(
        name="slow_trainer",
        title=f"A trainer at 0.7 of the policy's rate: {LOGNORMAL.text}, loop.max_policy_age={AGE_BOUND}",
        columns=("depth", "selection"),
        rows=rows,
    )


def slots(seconds: float) -> Study:
    """How much of a batch is sampled at once."""
    return Study(
        name="slots",
        title=f"Depth and decode slots, 512 samples a step: {LOGNORMAL.text}, loop.max_policy_age=16",
        columns=("slots", "depth"),
        rows={
            (str(count), str(depth)): base(slots=count, depth=depth, max_policy_age=16, seconds=seconds)
            for count in (64, 128, 256, 512)
            for depth in (1, 2, 4, 8)
        },
    )


def stragglers(seconds: float) -> Study:
    """Tools against members that come very late."""
    late = Rewards(straggling_share=0.005, straggling_s=600.0)
    tools: dict[str, dict[str, Any]] = {
        "none": {},
        "oversample=1.25": {"oversample": 1.25},
        "oversample=1.25 surplus=cut": {"oversample": 1.25, "surplus": "cut"},
        "complete_at=7": {"complete_at": 7},
        "group_deadline_s=120": {"group_deadline_s": 120.0},
    }
    rows = {(name,): base(depth=2, rewards=late, seconds=seconds, **keys) for name, keys in tools.items()}
    rows["none, synchronous",] = base(depth=0, rewards=late, seconds=seconds / 4)
    rows["complete_at=7, synchronous",] = base(depth=0, rewards=late, complete_at=7, seconds=seconds / 4)
    rows["oversample=1.25 surplus=cut, synchronous",] = base(
        depth=0, rewards=late, oversample=1.25, surplus="cut", seconds=seconds / 4
    )
    return Study(
        name="stragglers",
        title="Stragglers: one sample in 200 comes 600 s late; depth 2, loop.max_policy_age=4",
        columns=("against them",),
        rows=rows,
    )


def disturbances(seconds: float) -> Study:
    """What else may go wrong."""
    return Study(
        name="disturbances",
        title="Disturbances at depth 2, loop.max_policy_age=4",
        columns=("disturbance",),
        rows={
            ("none",): base(depth=2, seconds=seconds),
            ("a group is scored in 30 s",): base(depth=2, rewards=Rewards(mean_s=30.0), seconds=seconds),
            ("a group is scored in 120 s",): base(depth=2, rewards=Rewards(mean_s=120.0), seconds=seconds),
            ("5 % of samples cannot be scored",): base(depth=2, rewards=Rewards(failed_share=0.05), seconds=seconds),
            ("30 % of groups have equal rewards",): base(
                depth=2, rewards=Rewards(filtered_share=0.3), filter_zero_variance=True, seconds=seconds
            ),
            ("KV is recomputed at 80,000 tokens/s",): base(depth=2, recompute_tokens_per_s=80_000.0, seconds=seconds),
            ("weights go in every second step",): base(depth=2, sync_every=2, seconds=seconds),
        },
    )


def studies(seconds: float) -> list[Study]:
    """All tables, in the order in which they are shown."""
    return [
        depth_and_selection(seconds),
        slow_trainer(seconds),
        age_bound(seconds),
        slots(seconds),
        stragglers(seconds),
        disturbances(seconds),
    ]
