"""Run by TRL's interpreter: TRL's own loss functions on the tensors of a file.

python losses_trl.py TENSORS ANSWERS: what `torch.save` wrote goes in, loss and gradient of each variant come out.
Only what `_compute_loss` reads of its trainer is stood in for; the computation is TRL's.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from types import SimpleNamespace

import torch
from trl import GRPOTrainer
from trl.experimental.gmpo import GMPOTrainer

LENGTH = 16  # for dr_grpo
GRPO = {"loss_type": "grpo", "epsilon_low": 0.2, "epsilon_high": 0.2}
VARIANTS: dict[str, dict] = {  # what differs from the stand-in below
    "grpo": GRPO,
    "grpo with KL": GRPO | {"beta": 0.3},
    "grpo with unbiased KL": GRPO | {"beta": 0.3, "use_bias_correction_kl": True},
    "dr_grpo": GRPO | {"loss_type": "dr_grpo"},
    "dapo": GRPO | {"loss_type": "dapo", "epsilon_high": 0.28},
    "luspo": GRPO | {"loss_type": "luspo"},
    "cispo": GRPO | {"loss_type": "cispo", "epsilon_high": 1.3},
    "sapo": GRPO | {"loss_type": "sapo"},
    "gspo": GRPO | {"importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.05},
    "gmpo": GRPO | {"epsilon_low": 0.2, "epsilon_high": 0.2, "trainer": GMPOTrainer},
    "opsm": GRPO | {"off_policy_mask_threshold": 0.05},
    "decoupled": GRPO | {"use_vllm": True},
}


def stand_in(options: dict, logprobs: torch.Tensor) -> SimpleNamespace:
    """A trainer in training, alone in the world, without gradient accumulation."""
    arguments = {"use_bias_correction_kl": False, "delta": None, "steps_per_generation": 1}
    arguments |= {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}
    arguments |= {name: value for name, value in options.items() if name in arguments}
    plain = {"beta": 0.0, "importance_sampling_level": "token", "off_policy_mask_threshold": None, "use_vllm": False}
    return SimpleNamespace(
        **plain | {name: value for name, value in options.items() if name not in arguments},
        args=SimpleNamespace(**arguments),
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(
            num_processes=1, sync_gradients=True, gather=lambda x: x, reduce=lambda x, reduction: x
        ),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        vllm_importance_sampling_correction=True,
        current_gradient_accumulation_steps=1,
        max_completion_length=LENGTH,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None),
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
    )


def run(options: dict, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Loss and gradient of one variant. All tensors are [B, T], the advantages [B]."""
    logprobs = tensors["logprobs"].clone().requires_grad_()
    mask = tensors["mask"].long()
    old = tensors["proximal" if options.get("use_vllm") else "behaviour"]
    inputs = {
        "prompt_ids": torch.zeros_like(mask[:, :1]),
        "prompt_mask": torch.ones_like(mask[:, :1]),
        "completion_ids": torch.zeros_like(mask),
        "completion_mask": mask,
        "advantages": tensors["advantages"],
        "old_per_token_logps": old,
        "sampling_per_token_logps": tensors["behaviour"],
        "ref_per_token_logps": tensors["reference"],
        "importance_sampling_ratio": (tensors["proximal"] - tensors["behaviour"]).exp().clamp(max=1.2),
        "num_items_in_batch": mask.sum(),
    }
    trainer = options.get("trainer", GRPOTrainer)
    loss = trainer._compute_loss(stand_in(options, logprobs), None, inputs)
    loss.backward()
    return {"loss": loss.detach(), "gradient": logprobs.grad}


if __name__ == "__main__":
    given = torch.load(sys.argv[1])
    torch.save({name: run(options, given) for name, options in VARIANTS.items()}, sys.argv[2])
