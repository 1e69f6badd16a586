"""The records that flow from station to station.

Positions are aligned with the *token* everywhere: entry `t` of a loss mask, a log-probability, a version or an
advantage belongs to token `t`, the one predicted from the tokens before it. The first token of a sequence is
predicted from nothing and is never trained.

Plain Python sequences hold what one trajectory needs; `TrainingBatch` alone holds tensors. Absent is `None`, and
is never replaced by an empty or zero value. Lengths are checked where a record is made.

Torch is imported by name only, so that a process which never touches a tensor (the rewards) need not load it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

FinishReason = Literal["stop", "length", "abort"]


@dataclass(kw_only=True, slots=True, frozen=True)
class VersionSpan:
    """A half-open run of tokens sampled by one version of the policy.

    Example: `VersionSpan(version=7, start=0, end=57)` says that tokens 0 to 56 were sampled by version 7.
    """

    version: int
    start: int
    end: int

    def shifted(self, offset: int) -> VersionSpan:
        """The same run, counted from `offset` tokens earlier."""
        return VersionSpan(version=self.version, start=self.start + offset, end=self.end + offset)


def check_spans(spans: Sequence[VersionSpan], length: int, owner: str) -> None:
    """Raise ValueError unless `spans` cover `[0, length)` without gap, overlap, empty run or falling version."""
    position, version = 0, -1
    for span in spans:
        if span.start != position or span.end <= span.start or span.version < version:
            raise ValueError(
                f"{owner}: version span {span} does not continue at token {position} after version {version}"
            )
        position, version = span.end, span.version
    if position != length:
        raise ValueError(f"{owner}: version spans cover {position} of {length} tokens")


@dataclass(kw_only=True, slots=True, frozen=True)
class SamplingParams:
    """How tokens are drawn. Travels with a request to the engine.

    Example: `SamplingParams(max_tokens=6, stop_token_ids=(1,))` samples from the model's own distribution;
    `temperature=0` is greedy.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()  # the stop token itself is part of the completion
    ignore_eos: bool = False  # keep sampling past the stop tokens
    seed: int | None = None  # None: the engine draws one, different for every request
    stop: tuple[str, ...] = ()  # texts that end a turn; the tokens of the text stay in the completion


@dataclass(kw_only=True, slots=True, frozen=True)
class GroupRequest:
    """One prompt to be completed `n` times: what the policy is asked for.

    Example: `GroupRequest(request_id="g12", prompt_ids=(7, 2, 41), sampling=SamplingParams(max_tokens=6), n=8)`
    is answered by eight completions with the request ids `g12/0` to `g12/7`.
    """

    request_id: str
    prompt_ids: tuple[int, ...]  # [P]
    sampling: SamplingParams
    n: int = 1
    session: str | None = None  # turns of one rollout share it, so that they find the same prefix cache
    partials: tuple[Completion, ...] | None = None  # [n], go on from them; those that are finished stay as they are
    progress_s: float | None = None  # report the tokens sampled so far every so many seconds; 0: every step


@dataclass(kw_only=True, slots=True)
class Completion:
    """The policy's answer to one request, with the version of the weights behind every token.

    Example: `Completion(request_id="g12/0", prompt_ids=[7, 2, 41], token_ids=[5, 1], logprobs=[-0.7, -0.1],
    spans=[VersionSpan(version=3, start=0, end=2)], finish_reason="stop")`.
    """

    request_id: str
    prompt_ids: Sequence[int]  # [P]
    token_ids: Sequence[int]  # [n], the stop token included when it was sampled
    logprobs: Sequence[float]  # [n], of the distribution really sampled from (after temperature, top-k, top-p)
    spans: Sequence[VersionSpan]  # cover [0, n), stamped by the engine
    finish_reason: FinishReason
    routed_experts: Any | None = None  # [P + n - 1, layers, top_k]; None: not recorded
    sampling_mask: Any | None = None  # kept token ids of each position; None: not recorded

    def __post_init__(self) -> None:
        if len(self.logprobs) != len(self.token_ids):
            raise ValueError(
                f"completion {self.request_id}: {len(self.token_ids)} tokens but {len(self.logprobs)} logprobs"
            )
        check_spans(self.spans, len(self.token_ids), f"completion {self.request_id}")


@dataclass(kw_only=True, slots=True, frozen=True)
class Prompt:
    """A row of the dataset, tokenized.

    Example: `Prompt(prompt_id="train/17", text="cabfd>", token_ids=(4, 2, 3, 7, 5, 40), row={"answer": "abcdf"})`.
    """

    prompt_id: str
    text: str
    token_ids: tuple[int, ...]  # [P]
    row: Mapping[str, Any] = field(default_factory=dict)  # every column of the dataset; rewards read it


@dataclass(kw_only=True, slots=True, frozen=True)
class Score:
    """What the scorers say of one trajectory: the weighted sum and its parts by reward name.

    Example: `Score(reward=0.75, parts={"exact": 1.0, "short": 0.5})` for weights 0.5 and 0.5.
    """

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not math.isfinite(self.reward):
            raise ValueError(f"a score must be a finite number, not {self.reward}")


@dataclass(kw_only=True, slots=True, frozen=True)
class Failure:
    """Why a sample has no result. It is counted under its reason and never stands for a number.

    Example: `Failure(reason="timeout", message="reward exact: no answer within 5.0 s")`.
    """

    reason: str  # a short word, used in metric names
    message: str


@dataclass(kw_only=True, slots=True)
class Trajectory:
    """One rollout of one prompt: the prompt, everything sampled, everything the environment added.

    Example, two prompt tokens and three sampled ones: `token_ids=[7, 2, 5, 9, 1]`,
    `loss_mask=[False, False, True, True, True]`, `logprobs=[0.0, 0.0, -0.7, -0.2, -0.1]`,
    `spans=[VersionSpan(version=3, start=2, end=5)]`.
    """

    trajectory_id: str  # "<group>/<member>"
    group_id: str
    token_ids: list[int]  # [T]
    loss_mask: list[bool]  # [T], True for tokens that are trained
    logprobs: list[float]  # [T], behaviour logprobs; 0.0 where nothing was sampled
    spans: list[VersionSpan]  # rising runs over [0, T) that cover the sampled tokens
    finish_reason: FinishReason
    completion_text: str = ""  # what the policy wrote, for rewards and records
    environment_reward: float | None = None  # sum over the turns; None: the environment gives none
    score: Score | None = None  # None: not scored
    advantage: float | None = None  # spread over the trained tokens; None: not computed
    reference_logprobs: list[float] | None = None  # [T]; None: no reference

    def __post_init__(self) -> None:
        sizes = {len(self.token_ids), len(self.loss_mask), len(self.logprobs)}
        if self.reference_logprobs is not None:
            sizes.add(len(self.reference_logprobs))
        if len(sizes) != 1:
            raise ValueError(f"trajectory {self.trajectory_id}: token_ids, loss_mask and logprobs have {sizes} entries")
        if self.loss_mask and self.loss_mask[0]:
            raise ValueError(f"trajectory {self.trajectory_id}: the first token cannot be trained")

    def oldest_trained_version(self) -> int | None:
        """The oldest version among the trained tokens; None when no token is trained."""
        mask = self.loss_mask
        return min((s.version for s in self.spans if any(mask[s.start : s.end])), default=None)

    def age(self, trainer_version: int) -> int:
        """Trainer version minus the oldest version among the trained tokens (0 when none is trained)."""
        oldest = self.oldest_trained_version()
        return 0 if oldest is None else trainer_version - oldest


@dataclass(kw_only=True, slots=True)
class Group:
    """The trajectories of one prompt.

    Example: `Group(group_id="g12", prompt=prompt, trajectories=[t0, t1, t2, t3])` after one of eight members
    failed to be scored and three were dropped.
    """

    group_id: str
    prompt: Prompt
    trajectories: list[Trajectory]


@dataclass(kw_only=True, slots=True)
class TrainingBatch:
    """Trajectories packed into rows. A row holds whole sequences one after the other, then padding.

    Example, sequences of 3 and 2 tokens in one row of 6: `positions=[[0, 1, 2, 0, 1, 0]]`,
    `sequence_ids=[[0, 0, 0, 1, 1, -1]]`. `positions == 0` starts a sequence; padding starts its own.
    """

    token_ids: torch.Tensor  # [R, L] int64
    positions: torch.Tensor  # [R, L] int64, restart at 0 with every sequence
    sequence_ids: torch.Tensor  # [R, L] int32, index into the packed list, -1 for padding
    loss_mask: torch.Tensor  # [R, L] bool
    logprobs: torch.Tensor  # [R, L] float32, behaviour logprobs, 0 where nothing was sampled
    versions: torch.Tensor  # [R, L] int32, version that sampled the token, -1 where nothing was sampled
    advantages: torch.Tensor  # [R, L] float32
    reference_logprobs: torch.Tensor | None = None  # [R, L] float32

    @property
    def trained_tokens(self) -> int:
        """How many tokens the loss averages over, on all ranks together."""
        return int(self.loss_mask.sum())


@dataclass(kw_only=True, slots=True, frozen=True)
class StepResult:
    """What one optimizer step did.

    Example: `StepResult(version=8, metrics={"loss/policy": -0.013, "loss/grad_norm": 0.4})`: eight steps are done.
    """

    version: int  # completed optimizer steps, this one included
    metrics: Mapping[str, float]
