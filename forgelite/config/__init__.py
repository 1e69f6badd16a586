"""One typed configuration tree: YAML files, `key.sub=value` overrides, checks that name the keys."""

from forgelite.config.advantage import AdvantageConfig
from forgelite.config.grpo import GRPOConfig, GRPOMeshConfig, GRPOSamplingConfig, UpdateConfig
from forgelite.config.imports import import_object
from forgelite.config.loading import check_config, describe_keys, load_config, to_yaml
from forgelite.config.loss import LossConfig
from forgelite.config.schema import (
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    LoopConfig,
    MeshConfig,
    MetricsConfig,
    ModelConfig,
    PolicyConfig,
    ReferenceConfig,
    RewardConfig,
    RewardFunctionConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
    StationConfig,
    WeightsConfig,
)
from forgelite.config.serve import EndpointConfig, ServeConfig
from forgelite.config.sft import SFTConfig, SFTLoopConfig
from forgelite.config.trainer import TrainerConfig

__all__ = [
    "AdvantageConfig",
    "CheckpointConfig",
    "DataConfig",
    "EndpointConfig",
    "EvalConfig",
    "GRPOConfig",
    "GRPOMeshConfig",
    "GRPOSamplingConfig",
    "LoopConfig",
    "LossConfig",
    "MeshConfig",
    "MetricsConfig",
    "ModelConfig",
    "PolicyConfig",
    "ReferenceConfig",
    "RewardConfig",
    "RewardFunctionConfig",
    "RolloutConfig",
    "RunConfig",
    "SFTConfig",
    "SFTLoopConfig",
    "SamplingConfig",
    "ServeConfig",
    "StationConfig",
    "TrainerConfig",
    "UpdateConfig",
    "WeightsConfig",
    "check_config",
    "describe_keys",
    "import_object",
    "load_config",
    "to_yaml",
]
