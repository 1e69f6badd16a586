"""After an update the engine computes with the new weights: vLLM and a fresh forward pass agree."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

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


@pytest.fixture(params=ARCHITECTURES)
def checkpoints(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    return (
        save_checkpoint(tmp_path / "a", request.param, seed=1),
        save_checkpoint(tmp_path / "b", request.param, seed=2),
    )


def test_sampled_logprobs_are_those_of_a_fresh_forward_before_and_after_an_update(
    host: EngineHost, checkpoints: tuple[Path, Path]
) -> None:
    old, new = checkpoints
    host.build(old, ENGINE)
    try:
        (before,) = sample(host, group("before", n=2, max_tokens=32))
        host.update(1, partial(read_checkpoint, new))
        (after,) = sample(host, group("after", n=2, max_tokens=32))
        host.update(2, partial(read_checkpoint, old))
        (back,) = sample(host, group("back", n=2, max_tokens=32))
    finally:
        host.close()

    for completion, folder, other in [(before[0], old, new), (after[1], new, old), (back[0], old, new)]:
        assert furthest(completion.logprobs, reference_logprobs(folder, completion)) < TOLERANCE
        assert furthest(completion.logprobs, reference_logprobs(other, completion)) > 0.1
    assert [completion.spans[0].version for completion in (before[0], after[0], back[0])] == [0, 1, 2]
