"""Serve a model through an OpenAI-compatible endpoint, until Ctrl-C.

python -m apps.serve.main --config configs/serve/toy.yaml endpoint.port=8000
"""

from __future__ import annotations

import sys

from forgelite.command import run_app
from forgelite.config import ServeConfig


async def main(config: ServeConfig) -> None:
    """Check the inputs, start the replicas, serve until the end."""
    from forgelite.launching import launch_policy
    from forgelite.preparation import prepare_serving
    from forgelite.serving import open_endpoint

    tokenizer, sampling, api_key = prepare_serving(config)
    async with (
        launch_policy(config, on_phase=lambda text: print(text, flush=True)) as served,
        open_endpoint(
            served.service,
            settings=config.endpoint,
            tokenizer=tokenizer,
            sampling=sampling,
            max_model_len=served.capabilities["max_model_len"],
            api_key=api_key,
            request_timeout_s=config.policy.request_timeout_s,
        ) as endpoint,
    ):
        print(f"serving {config.model.path} as {config.endpoint.model_name!r} at {endpoint.base_url}", flush=True)
        await served.died


if __name__ == "__main__":
    sys.exit(run_app(ServeConfig, main, name="apps.serve.main", description=__doc__))
