"""The losses of TRL and torchtitan, run by themselves on the same numbers, say the same as ours."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from forgelite.config import corrections, loss
from forgelite.config.policy_loss import PolicyLossConfig
from forgelite.losses import BatchSize, LossInputs, make_loss
from tests.unit.losses_batches import VERSION

ROOT = Path(__file__).parents[2]
TRL_PYTHON = ROOT / ".venv-trl/bin/python"

TRL: dict[str, PolicyLossConfig] = {
    "grpo": loss.GRPOLossConfig(),
    "grpo with KL": loss.GRPOLossConfig(kl_coefficient=0.3),
    "grpo with unbiased KL": loss.GRPOLossConfig(kl_coefficient=0.3, kl_estimator="k3_unbiased"),
    "dr_grpo": loss.DrGRPOLossConfig(constant_length=16),
    "dapo": loss.DAPOLossConfig(),
    "luspo": loss.ClipLossConfig(clip_high=0.2, aggregation="constant", constant_length=1),
    "cispo": loss.CISPOLossConfig(clip_high=0.3),
    "sapo": loss.SAPOLossConfig(aggregation="sequence_mean"),
    "gspo": loss.GSPOLossConfig(clip_low=0.05, clip_high=0.05),
    "gmpo": loss.GMPOLossConfig(clip_low=0.2, clip_high=0.2),
    "opsm": loss.GRPOLossConfig(corrections=[corrections.OPSM(threshold=0.05)]),
    "decoupled": loss.GRPOLossConfig(anchor="proximal", corrections=[corrections.TokenTIS(cap=1.2)]),
}
TORCHTITAN: dict[str, PolicyLossConfig] = {
    "dapo": loss.DAPOLossConfig(),
    "grpo, token mean": loss.ClipLossConfig(clip_high=0.2),
}


def _tensors() -> dict[str, torch.Tensor]:
    """Eight sequences of at most nine tokens, with gaps in their masks; numbers that float32 holds exactly."""
    generator = torch.Generator().manual_seed(11)

    def noise() -> torch.Tensor:
        return 0.3 * torch.randn(8, 9, generator=generator)

    behaviour = (-2.0 + noise()).clamp(max=-0.3)
    logprobs = (behaviour + noise()).clamp(max=-0.1)
    mask = torch.rand(8, 9, generator=generator) > 0.3
    mask[:, 0] = True
    found = {
        "behaviour": behaviour,
        "logprobs": logprobs,
        "proximal": logprobs + 0.3 * noise(),
        "reference": behaviour + noise(),
        "advantages": torch.randn(8, generator=generator),
    }
    return {name: tensor.double() for name, tensor in found.items()} | {"mask": mask}


def _ask(python: Path | str, script: str, folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    torch.save(_tensors(), folder / "tensors.pt")
    finished = subprocess.run(
        [python, ROOT / "tests/unit" / script, folder / "tensors.pt", folder / "answers.pt"],
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    return torch.load(folder / "answers.pt")


@pytest.fixture(scope="module")
def trl(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, torch.Tensor]]:
    if not TRL_PYTHON.exists():
        pytest.skip("TRL is not installed: make bench-trl-env")
    return _ask(TRL_PYTHON, "losses_trl.py", tmp_path_factory.mktemp("trl"))


@pytest.fixture(scope="module")
def torchtitan(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, torch.Tensor]]:
    if importlib.util.find_spec("torchtitan") is None:
        pytest.skip("torchtitan is not installed")
    return _ask(sys.executable, "losses_torchtitan.py", tmp_path_factory.mktemp("torchtitan"))


def _agrees(config: PolicyLossConfig, answer: dict[str, torch.Tensor]) -> None:
    given = _tensors()
    mask = given["mask"]
    rows, length = mask.shape
    inputs = LossInputs(
        logprobs=given["logprobs"].float().requires_grad_(),
        behaviour_logprobs=given["behaviour"].float(),
        proximal_logprobs=given["proximal"].float(),
        reference_logprobs=given["reference"].float(),
        advantages=given["advantages"].float()[:, None].expand(rows, length),
        mask=mask,
        versions=torch.full((rows, length), VERSION, dtype=torch.int32),
        sequence_ids=torch.arange(rows, dtype=torch.int32)[:, None].expand(rows, length),
    )
    output = make_loss(config)(inputs, size=BatchSize.of(mask, inputs.sequence_ids), trainer_version=VERSION)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(answer["loss"].item(), abs=1e-6)
    torch.testing.assert_close(inputs.logprobs.grad.double(), answer["gradient"].double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", list(TRL))
def test_trl_computes_the_same_loss(name: str, trl: dict[str, dict[str, torch.Tensor]]) -> None:
    _agrees(TRL[name], trl[name])


@pytest.mark.engine
@pytest.mark.parametrize("name", list(TORCHTITAN))
def test_torchtitan_computes_the_same_loss(name: str, torchtitan: dict[str, dict[str, torch.Tensor]]) -> None:
    _agrees(TORCHTITAN[name], torchtitan[name])
