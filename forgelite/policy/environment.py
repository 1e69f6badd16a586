"""The environment of a policy process.

vLLM, OpenMP and torch read these variables once, when they are loaded. Setting them inside a running process
comes too late, so whoever spawns the process passes them on (Monarch: `bootstrap_command` with `with_env`).
"""

from __future__ import annotations

from typing import Literal

Device = Literal["cpu", "cuda"]


def policy_environment(device: Device) -> dict[str, str]:
    """The variables that must be set before the interpreter of a policy process starts.

    Args:
        device: where the engine computes, "cpu" or "cuda".

    Raises:
        ValueError: another device.
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f"policy device {device!r}: only 'cpu' and 'cuda' are supported")
    common = {
        # The engine core lives in this process, where one thread can swap weights between two of its steps.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # A run never depends on a hub or a statistics server being reachable.
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    if device == "cuda":
        return common
    return common | {
        # Two OpenMP threads that spin on shared cores made a step of a tiny model 40 times slower.
        "OMP_NUM_THREADS": "1",
        # `enforce_eager` does not stop vLLM from compiling the sampler's helper with Inductor at the first
        # token: 2 to 17 seconds on a CPU for nothing.
        "TORCH_COMPILE_DISABLE": "1",
    }
