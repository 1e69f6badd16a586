"""An engine whose parameters are views of a published version."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest
import torch

from forgelite.errors import WeightMismatch
from forgelite.weights import SHARED_MEMORY, arena_layout
from forgelite.weights.arena_reader import ArenaReader
from forgelite.weights.arena_writer import ArenaWriter
from tests.engines.policy_process import (
    ARCHITECTURES,
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


def published(checkpoint: Path) -> Mapping[str, torch.Tensor]:
    """The tensors of a checkpoint as a lease gives them. They stay mapped after the segment has lost its name."""
    tensors = read_checkpoint(checkpoint)
    writer = ArenaWriter.create(tensors, folder=SHARED_MEMORY, run_id="zero-copy", slots=2, fingerprinted=False)
    writer.write(1, tensors, timeout_s=1.0)
    reader = ArenaReader(writer.path)
    with reader.lease(1) as (_, views):
        kept = dict(views)
    reader.close()
    writer.close()
    return kept


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_version_served_in_place_gives_the_logprobs_of_a_fresh_forward(
    host: EngineHost, tmp_path: Path, architecture: str
) -> None:
    old = save_checkpoint(tmp_path / "a", architecture, seed=1)
    new = save_checkpoint(tmp_path / "b", architecture, seed=2)
    host.build(old, ENGINE, swap="zero_copy")
    try:
        host.update(1, partial(published, new))
        (after,) = sample(host, group("after", n=2, max_tokens=32))
        host.update(2, partial(published, old))
        (back,) = sample(host, group("back", n=2, max_tokens=32))
    finally:
        host.close()

    for completion, folder, other in [(after[1], new, old), (back[0], old, new)]:
        assert furthest(completion.logprobs, reference_logprobs(folder, completion)) < TOLERANCE
        assert furthest(completion.logprobs, reference_logprobs(other, completion)) > 0.1


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
