"""Each CPU shim is still needed: what goes wrong without it. When one of these fails, its shim can go."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from forgelite.errors import StationDied
from tests.engines.policy_process import (
    ENGINE,
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
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    for architecture in ("llama", "qwen3_moe"):
        for seed in (1, 2):
            save_checkpoint(folder / f"{architecture}{seed}", architecture, seed=seed)
    return folder


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineHost]:
    """A process in which vLLM has never seen a model and counts the interpreters that it would start."""
    with engine_process(VLLM_CACHE_ROOT=str(tmp_path_factory.mktemp("vllm"))) as host:
        host.run(count_inspecting_children)
        yield host


def count_inspecting_children() -> None:
    from vllm.model_executor.models import registry

    registry.children = 0

    def inspect_here(inspect: Callable[[], object]) -> object:
        registry.children += 1
        return inspect()

    registry._run_in_subprocess = inspect_here


def inspecting_children() -> int:
    from vllm.model_executor.models import registry

    return registry.children


def test_without_registration_vllm_starts_an_interpreter_to_inspect_the_model(
    host: EngineHost, checkpoints: Path
) -> None:
    host.build(checkpoints / "llama1", ENGINE)
    host.close()
    assert host.run(inspecting_children) == 0

    host.build(checkpoints / "qwen3_moe1", ENGINE, without="register_architecture")
    host.close()
    assert host.run(inspecting_children) == 1


def test_without_live_linears_an_update_fails(host: EngineHost, checkpoints: Path) -> None:
    host.build(checkpoints / "llama1", ENGINE, without="keep_linears_live")
    with pytest.raises(StationDied, match=r"into parameter \(torch.Size\(\[0\]\)\)"):
        host.update(1, partial(read_checkpoint, checkpoints / "llama2"))
    host.close()


def test_without_unpacked_experts_an_update_gives_wrong_logprobs(host: EngineHost, checkpoints: Path) -> None:
    new = checkpoints / "qwen3_moe2"
    host.build(checkpoints / "qwen3_moe1", ENGINE, without="unpacked_experts")
    host.update(1, partial(read_checkpoint, new))
    ((completion,),) = sample(host, group("updated", max_tokens=32))
    host.close()

    assert furthest(completion.logprobs, reference_logprobs(new, completion)) > 0.1


LONG = {"prompt": [7 * i % 90 + 1 for i in range(100)], "n": 3, "seed": 5}
IN_PARTS = ENGINE | {"max_num_batched_tokens": 32, "max_num_seqs": 8}  # tokens of a step


def test_without_held_generators_a_prompt_that_is_prefilled_in_parts_kills_the_engine(
    host: EngineHost, checkpoints: Path
) -> None:
    host.build(checkpoints / "llama1", IN_PARTS, without="hold_generators_of_partial_prefills")
    (outcome,) = sample(host, group("doomed", **LONG))
    host.close()
    assert "CPU Generator does not use offset" in outcome.message


def test_what_is_sampled_does_not_depend_on_how_a_prompt_is_cut(host: EngineHost, checkpoints: Path) -> None:
    sampled = []
    for engine in (ENGINE, IN_PARTS):
        host.build(checkpoints / "llama1", engine)
        (completions,) = sample(host, group("long", **LONG))
        host.close()
        sampled.append([completion.token_ids for completion in completions])
    assert sampled[0] == sampled[1]


def keep_onednn_away(away: bool) -> None:
    """oneDNN asks for the permission itself, at its first product in bfloat16."""
    torch._C._set_mkldnn_enabled(not away)


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="this CPU has no AMX tiles")
def test_without_amx_permission_a_bfloat16_step_kills_the_process(host: EngineHost, checkpoints: Path) -> None:
    engine = ENGINE | {"dtype": "bfloat16"}
    with engine_process() as doomed:
        doomed.run(keep_onednn_away, True)
        doomed.build(checkpoints / "llama1", engine, without="allow_amx")
        doomed.submit([group("first")])
        with pytest.raises((EOFError, ConnectionError)):
            doomed.collect(60.0)

    host.run(keep_onednn_away, True)
    host.build(checkpoints / "llama1", engine)
    ((completion,),) = sample(host, group("first"))
    host.close()
    host.run(keep_onednn_away, False)
    assert len(completion.token_ids) == 8
