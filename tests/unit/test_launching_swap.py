from __future__ import annotations

from pathlib import Path

import pytest

from forgelite.config import GRPOConfig, load_config
from forgelite.errors import ConfigError
from forgelite.launching import choose_swap, launch

TOY = Path(__file__).parents[2] / "configs/grpo/toy.yaml"


@pytest.mark.parametrize(
    ("asked", "device", "carrier", "chosen"),
    [
        ("auto", "cpu", "shm", "zero_copy"),
        ("zero_copy", "cpu", "rdma", "zero_copy"),
        ("auto", "cpu", "filesystem", "copy"),
        ("copy", "cpu", "shm", "copy"),
        ("auto", "cuda", "shm", "copy"),
    ],
)
def test_versions_are_served_in_place_where_shared_memory_meets_a_cpu_and_nobody_asked_for_copies(
    asked: str, device: str, carrier: str, chosen: str
) -> None:
    assert choose_swap(asked, device, carrier) == chosen


def test_serving_in_place_on_a_gpu_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"weights\.swap=zero_copy, but the policy runs on cuda"):
        choose_swap("zero_copy", "cuda", "shm")


def test_ranks_of_one_replica_copy_their_slices() -> None:
    assert choose_swap("auto", "cpu", "shm", ranks=2) == "copy"
    with pytest.raises(ConfigError, match=r"weights\.swap=zero_copy, but policy\.engine\.tensor_parallel_size=2"):
        choose_swap("zero_copy", "cpu", "shm", ranks=2)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["policy.replicas=2"], r"policy\.replicas=2 on GPUs: say in mesh\.policy_gpus"),
        (
            ["mesh.policy_gpus=0", "policy.engine.tensor_parallel_size=2"],
            r"policy_gpus=0 gives each .* replicas 1",
        ),
    ],
)
async def test_replicas_and_gpus_that_do_not_fit_together_are_an_error_before_any_process_starts(
    overrides: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forgelite.launching.choose_device", lambda asked: "cuda")
    monkeypatch.setattr("forgelite.launching.Fleet", None)
    with pytest.raises(ConfigError, match=message):
        async with launch(load_config(GRPOConfig, TOY, overrides)):
            pass
