"""forgelite: asynchronous RL post-training of language models on PyTorch.

The public names, each with its own documentation:

    the run        GRPOConfig, SFTConfig, load_config, prepare, make_rollout, launch, Stations, Loop, evaluate
    the endpoint   ServeConfig, launch_policy, open_endpoint, open_rollout_endpoint, HarnessRollout
    the records    Prompt, GroupRequest, SamplingParams, Completion, VersionSpan, Trajectory, Group, Score,
                   Failure, TrainingBatch, StepResult
    your own parts Environment, Transition, SingleTurn, RewardSample, Rollout, score_group
    the stations   PolicyService, WeightStore, Manifest, Ledger, GroupQueue, pack, unpack
    errors         ForgeliteError and its kinds, see `forgelite.errors`

A name is imported when it is first used (PEP 562), so `import forgelite` loads neither torch nor an engine, and a
process that only computes rewards stays small.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forgelite.buffer.ledger import Ledger as Ledger
    from forgelite.buffer.packing import pack as pack
    from forgelite.buffer.packing import unpack as unpack
    from forgelite.buffer.queue import GroupQueue as GroupQueue
    from forgelite.buffer.staleness import StalenessPolicy as StalenessPolicy
    from forgelite.config import GRPOConfig as GRPOConfig
    from forgelite.config import ServeConfig as ServeConfig
    from forgelite.config import SFTConfig as SFTConfig
    from forgelite.config import load_config as load_config
    from forgelite.errors import ForgeliteError as ForgeliteError
    from forgelite.evaluation import evaluate as evaluate
    from forgelite.launching import Stations as Stations
    from forgelite.launching import launch as launch
    from forgelite.launching import launch_policy as launch_policy
    from forgelite.loop import Loop as Loop
    from forgelite.policy.service import PolicyService as PolicyService
    from forgelite.preparation import make_rollout as make_rollout
    from forgelite.preparation import open_rollout_endpoint as open_rollout_endpoint
    from forgelite.preparation import prepare as prepare
    from forgelite.rollout.environment import Environment as Environment
    from forgelite.rollout.environment import SingleTurn as SingleTurn
    from forgelite.rollout.environment import Transition as Transition
    from forgelite.rollout.episode import Rollout as Rollout
    from forgelite.rollout.harness import HarnessRollout as HarnessRollout
    from forgelite.scoring.group import score_group as score_group
    from forgelite.scoring.reward import RewardSample as RewardSample
    from forgelite.serving import open_endpoint as open_endpoint
    from forgelite.types import Completion as Completion
    from forgelite.types import Failure as Failure
    from forgelite.types import Group as Group
    from forgelite.types import GroupRequest as GroupRequest
    from forgelite.types import Prompt as Prompt
    from forgelite.types import SamplingParams as SamplingParams
    from forgelite.types import Score as Score
    from forgelite.types import StepResult as StepResult
    from forgelite.types import TrainingBatch as TrainingBatch
    from forgelite.types import Trajectory as Trajectory
    from forgelite.types import VersionSpan as VersionSpan
    from forgelite.weights import Manifest as Manifest
    from forgelite.weights import WeightStore as WeightStore

_HOME = {
    "forgelite.buffer.ledger": ("Ledger",),
    "forgelite.buffer.packing": ("pack", "unpack"),
    "forgelite.buffer.queue": ("GroupQueue",),
    "forgelite.buffer.staleness": ("StalenessPolicy",),
    "forgelite.config": ("GRPOConfig", "SFTConfig", "ServeConfig", "load_config"),
    "forgelite.errors": ("ForgeliteError",),
    "forgelite.evaluation": ("evaluate",),
    "forgelite.launching": ("Stations", "launch", "launch_policy"),
    "forgelite.loop": ("Loop",),
    "forgelite.policy.service": ("PolicyService",),
    "forgelite.preparation": ("make_rollout", "open_rollout_endpoint", "prepare"),
    "forgelite.rollout.environment": ("Environment", "SingleTurn", "Transition"),
    "forgelite.rollout.episode": ("Rollout",),
    "forgelite.rollout.harness": ("HarnessRollout",),
    "forgelite.scoring.group": ("score_group",),
    "forgelite.scoring.reward": ("RewardSample",),
    "forgelite.serving": ("open_endpoint",),
    "forgelite.types": (
        *("Completion", "Failure", "Group", "GroupRequest", "Prompt", "SamplingParams", "Score", "StepResult"),
        *("TrainingBatch", "Trajectory", "VersionSpan"),
    ),
    "forgelite.weights": ("Manifest", "WeightStore"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
