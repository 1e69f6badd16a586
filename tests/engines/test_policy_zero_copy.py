"""An engine whose parameters are views of a published version. Its logprobs: `test_policy_parity.py`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest
import torch

from forgelite.errors import WeightMismatch
from forgelite.weights import arena_layout
from tests.engines.policy_process import (
    ENGINE,
    TOLERANCE,
    EngineHost,
    engine_process,
    furthest,
    group,
    read_checkpoint,
    reference_logprobs,
    sample,
    save_checkpoint,
)

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def host() -> Iterator[EngineHost]:
    with engine_process() as host:
        yield host


memory: list[torch.Tensor] = []  # in the engine's process: what the tensors below lie in


def in_private_memory(checkpoint: Path) -> Mapping[str, torch.Tensor]:
    """The tensors of a checkpoint, laid out as in a slot, in memory that a test may write to."""
    tensors = read_checkpoint(checkpoint)
    layout = arena_layout.plan(tensors, slots=2, retained=1, fingerprinted=False)
    memory[:] = [torch.zeros(layout.total_bytes, dtype=torch.uint8)]
    views = arena_layout.slot_views(layout, memory[0], 0)
    for name, tensor in tensors.items():
        views[name].copy_(tensor)
    return views


def erase_it() -> None:
    memory[0].zero_()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("tied"), "qwen3_tied", seed=1)


@pytest.fixture
def serving(host: EngineHost, checkpoint: Path) -> Iterator[EngineHost]:
    host.build(checkpoint, ENGINE, swap="zero_copy")
    yield host
    host.close()


def test_the_engine_computes_with_the_published_memory_itself_tied_head_included(serving: EngineHost, checkpoint: Path):
    serving.update(1, partial(in_private_memory, checkpoint))
    ((before,),) = sample(serving, group("before"))
    serving.run(erase_it)
    ((erased,),) = sample(serving, group("erased"))

    uniform = -torch.log(torch.tensor(96.0)).item()
    assert furthest(before.logprobs, [uniform] * 8) > 0.1
    assert furthest(erased.logprobs, [uniform] * 8) < TOLERANCE


def test_weights_that_do_not_lie_in_place_are_refused_and_the_old_ones_stay(serving: EngineHost, checkpoint: Path):
    with pytest.raises(WeightMismatch, match=r"do not lie as vLLM's parameter .* needs them .* set weights.swap=copy"):
        serving.update(1, partial(read_checkpoint, checkpoint))

    ((completion,),) = sample(serving, group("after the failure"))
    assert completion.spans[0].version == 0
    assert furthest(completion.logprobs, reference_logprobs(checkpoint, completion)) < TOLERANCE
