"""The OpenAI endpoint of a policy's service: put together here, for `apps.serve` and for the harness of a run."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass

from forgelite.config import EndpointConfig
from forgelite.policy.openai.app import create_app
from forgelite.policy.openai.jobs import Backend, Policy
from forgelite.policy.openai.recording import SessionRecorder
from forgelite.policy.openai.server import is_loopback, serve
from forgelite.rollout.tokenizer import Tokenizer
from forgelite.types import SamplingParams

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True, frozen=True)
class Endpoint:
    """An endpoint that is being served.

    Example: `Endpoint(base_url="http://127.0.0.1:8000/v1", api_key=None, recorder=recorder)`.
    """

    base_url: str  # for an OpenAI client
    api_key: str | None
    recorder: SessionRecorder


@asynccontextmanager
async def open_endpoint(
    policy: Policy,
    *,
    settings: EndpointConfig,
    tokenizer: Tokenizer,
    sampling: SamplingParams,
    max_model_len: int,
    api_key: str | None,
    request_timeout_s: float,
) -> AsyncIterator[Endpoint]:
    """Serve `policy` while the block runs.

    Args:
        policy: that generates.
        settings: where to listen, and the limits.
        tokenizer: of the policy's model, with its chat template.
        sampling: of a request that says nothing else.
        max_model_len: longest prompt and answer together, in tokens.
        api_key: that clients must send; None: none.
        request_timeout_s: deadline of one request (`policy.request_timeout_s`).

    Raises:
        ConfigError: the address cannot be bound.
    """
    if api_key is None and not is_loopback(settings.host):
        logger.warning(
            "the endpoint on endpoint.host=%s asks for no key: whoever reaches this machine can use it "
            "(set endpoint.api_key_env)",
            settings.host,
        )
    recorder = SessionRecorder(max_unopened=settings.recorded_sessions)
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="endpoint-planner") as planner:
        backend = Backend(
            policy=policy,
            tokenizer=tokenizer,
            planner=planner,
            recorder=recorder,
            defaults=sampling,
            model_name=settings.model_name,
            max_model_len=max_model_len,
            timeout_s=request_timeout_s,
        )
        app = create_app(backend, api_key=api_key, max_body_bytes=settings.max_body_bytes)
        async with serve(app, host=settings.host, port=settings.port) as address:
            yield Endpoint(base_url=f"{address}/v1", api_key=api_key, recorder=recorder)
