"""After an update the engine computes with the new weights: vLLM and a fresh forward pass agree."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest
import torch

from forgelite.weights import SHARED_MEMORY
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


@pytest.fixture(params=ARCHITECTURES)
def checkpoints(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    return (
        save_checkpoint(tmp_path / "a", request.param, seed=1),
        save_checkpoint(tmp_path / "b", request.param, seed=2),
    )


@pytest.mark.parametrize(("swap", "load"), [("copy", read_checkpoint), ("zero_copy", published)], ids=["copy", "view"])
def test_sampled_logprobs_are_those_of_a_fresh_forward_before_and_after_an_update(
    host: EngineHost, checkpoints: tuple[Path, Path], swap: str, load: Callable[[Path], Mapping[str, torch.Tensor]]
) -> None:
    old, new = checkpoints
    host.build(old, ENGINE, swap=swap)
    try:
        (before,) = sample(host, group("before", n=2, max_tokens=32))
        host.update(1, partial(load, new))
        (after,) = sample(host, group("after", n=2, max_tokens=32))
        host.update(2, partial(load, old))
        (back,) = sample(host, group("back", n=2, max_tokens=32))
    finally:
        host.close()

    for completion, folder, other in [(before[0], old, new), (after[1], new, old), (back[0], old, new)]:
        assert furthest(completion.logprobs, reference_logprobs(folder, completion)) < TOLERANCE
        assert furthest(completion.logprobs, reference_logprobs(other, completion)) > 0.1
    assert [completion.spans[0].version for completion in (before[0], after[0], back[0])] == [0, 1, 2]
