"""The configuration of `apps.serve`: its sections, and what must fit together across them."""

from __future__ import annotations

from pydantic import Field, model_validator

from forgelite.config.schema import ModelConfig, PolicyConfig, StationConfig, check_policy_gpus
from forgelite.config.section import Section


class EndpointConfig(Section):
    """The OpenAI-compatible endpoint."""

    host: str = Field("127.0.0.1", description="address to bind; 0.0.0.0 lets other machines connect")
    port: int = Field(8000, ge=0, le=65535, description="port to bind; 0: a free one")
    api_key_env: str | None = Field(
        None, description="environment variable that holds the key clients must send; null: no key is asked for"
    )
    model_name: str = Field("policy", min_length=1, description="what clients name as the model")
    max_body_bytes: int = Field(16 * 2**20, ge=1024, description="a longer request is refused")
    recorded_sessions: int = Field(
        64, ge=0, description="sessions (header X-Session-Id) that are kept; 0: requests with that header are refused"
    )


class ServeRunConfig(Section):
    """What makes it repeatable."""

    seed: int = Field(0, ge=0, description="requests without a seed derive theirs from it")


class ServeMeshConfig(StationConfig):
    """Processes, devices and deadlines."""

    policy_gpus: str | None = Field(None, description="GPUs, as in CUDA_VISIBLE_DEVICES; divided among the replicas")
    answer_timeout_s: float = Field(60.0, gt=0, description="a policy that leaves a short call unanswered is dead")


class ServeConfig(Section):
    """Everything that `apps.serve` can be told."""

    run: ServeRunConfig = Field(default_factory=ServeRunConfig)
    model: ModelConfig
    policy: PolicyConfig
    endpoint: EndpointConfig = Field(default_factory=EndpointConfig)
    mesh: ServeMeshConfig = Field(default_factory=ServeMeshConfig)

    @model_validator(mode="after")
    def _fits_together(self) -> ServeConfig:
        if self.model.path is None:
            raise ValueError("model.path is missing: a Hugging Face folder is served")
        check_policy_gpus(self.mesh.policy_gpus, self.policy.replicas)
        return self
