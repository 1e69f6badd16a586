"""Run as a process of its own: torchtitan's own loss of reinforcement learning on the tensors of a file.

python losses_torchtitan.py TENSORS ANSWERS. The module is loaded by its path, because importing its package imports
vLLM. The loss takes logits over a vocabulary of two; they are such that the chosen token has the given log-probability.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch
import torchtitan


def load_dapo() -> type:
    """`DAPOLoss` of torchtitan."""
    path = Path(torchtitan.__path__[0]) / "experiments/rl/losses/dapo.py"
    spec = importlib.util.spec_from_file_location("torchtitan_dapo", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks its own module up
    spec.loader.exec_module(module)
    return module.DAPOLoss


def run(low: float, high: float, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Loss and gradient by the log-probabilities, both with the bounds given."""
    dapo = load_dapo()
    logprobs = tensors["logprobs"].float().requires_grad_()
    logits = torch.stack([logprobs, (-logprobs.exp()).log1p()], dim=-1)  # [B, T, 2], already normalised
    mask = tensors["mask"]
    loss, _ = dapo(dapo.Config(ratio_clip_low=low, ratio_clip_high=high))(
        logits,
        torch.zeros_like(mask, dtype=torch.int64),
        float(mask.sum()),
        generator_logprobs=tensors["behaviour"].float(),
        advantages=tensors["advantages"].float()[:, None].expand_as(mask) * mask,
        loss_mask=mask,
    )
    loss.backward()
    return {"loss": loss.detach(), "gradient": logprobs.grad}


if __name__ == "__main__":
    given = torch.load(sys.argv[1])
    torch.save({"dapo": run(0.2, 0.28, given), "grpo, token mean": run(0.2, 0.2, given)}, sys.argv[2])
