"""Where tensors live, and the one thing torchtitan must be told about it.

torchtitan decides its device type once, when it is imported, and takes a machine without an accelerator for
one with CUDA (`torch._utils._get_available_device_type() or "cuda"` in `torchtitan.tools.utils`).
"""

from __future__ import annotations

import sys

import torch
import torch._utils


def prepare_torchtitan() -> torch.device:
    """Make torchtitan use the device that this process has. To be called before anything imports torchtitan.

    May be called again. The answer torchtitan asks torch for is replaced only while torchtitan asks.

    Returns:
        The device of this process: the current CUDA device, or the CPU.

    Raises:
        RuntimeError: torchtitan was imported before, and decided otherwise.
    """
    wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if "torchtitan.tools.utils" not in sys.modules:
        asked = torch._utils._get_available_device_type
        torch._utils._get_available_device_type = lambda: wanted
        try:
            import torchtitan.tools.utils  # noqa: F401
        finally:
            torch._utils._get_available_device_type = asked
    decided = sys.modules["torchtitan.tools.utils"].device_type
    if decided != wanted:
        raise RuntimeError(
            f"torchtitan was imported before prepare_torchtitan() and believes that its device is {decided}; "
            f"this process has {wanted}: call prepare_torchtitan() first"
        )
    return torch.device(wanted, torch.cuda.current_device()) if wanted == "cuda" else torch.device("cpu")
