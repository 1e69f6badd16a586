"""What a swap costs a running engine of 135M parameters: the pause, and the longest step beside the median one."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.weight_sync_arena import ManifestsInMemory
from forgelite.mesh.environment import station_environment
from forgelite.policy.environment import policy_environment
from forgelite.types import GroupRequest, SamplingParams
from forgelite.weights import WeightStore

SEQUENCES = 8
STEPS_BETWEEN = 12  # engine steps from one swap to the next

_FULL = {  # SmolLM2-135M
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
}
_SMALL = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
}


@dataclass(kw_only=True, slots=True, frozen=True)
class SwapTimes:
    """Seconds. Example: `SwapTimes(pauses=[0.0008], steps=[0.05, 0.05])`."""

    pauses: list[float]  # in which the engine did not sample, one a swap
    steps: list[float]  # of the engine, from the first swap on

    @property
    def longest_step(self) -> float:
        """The longest step by the median step."""
        return max(self.steps) / statistics.median(self.steps)


class TimedEngine:
    """An engine that notes how long each step took, and passes everything else on."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.limits = engine.limits
        self.step_seconds: list[float] = []
        self._stepped = threading.Condition()

    def wait_for_steps(self, count: int) -> None:
        """Return when the engine has made `count` steps more than now."""
        with self._stepped:
            target = len(self.step_seconds) + count
            if not self._stepped.wait_for(lambda: len(self.step_seconds) >= target, timeout=60.0):
                raise RuntimeError(f"the engine made no {count} steps within 60 s")

    def step(self) -> Sequence[Any]:
        begin = time.perf_counter()
        sampled = self._engine.step()
        with self._stepped:
            self.step_seconds.append(time.perf_counter() - begin)
            self._stepped.notify_all()
        return sampled

    def prepare_weights(self, tensors: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        return self._engine.prepare_weights(tensors)

    def add(self, *arguments: Any, **named: Any) -> None:
        self._engine.add(*arguments, **named)

    def abort(self, sequence_ids: Any) -> None:
        self._engine.abort(sequence_ids)

    def queue_lengths(self) -> tuple[int, int]:
        return self._engine.queue_lengths()

    def drop_kv(self) -> None:
        self._engine.drop_kv()

    def close(self) -> None:
        self._engine.close()


def measure_swaps(swap: Literal["copy", "zero_copy"], *, swaps: int, quick: bool) -> SwapTimes:
    """Run an engine in a process of its own, swap versions under it while it samples, and give the times.

    Keys and values of older versions are kept, so that what is seen is the swap, not the recomputation.

    Args:
        swap: as `weights.swap`.
        swaps: how many; one more goes before, which faults the pages in.
        quick: with a small model.
    """
    environment = station_environment(**policy_environment("cpu"))
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    engine = context.Process(target=_serve, args=(theirs, swap, swaps, quick))
    try:
        engine.start()
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
    theirs.close()
    try:
        return ours.recv()
    finally:
        engine.kill()
        engine.join()


def _serve(pipe: Connection, swap: Literal["copy", "zero_copy"], swaps: int, quick: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tensors = _save_model(Path(folder), _SMALL if quick else _FULL)
        pipe.send(asyncio.run(_swap_while_sampling(folder, tensors, swap, swaps)))


async def _swap_while_sampling(
    folder: str, tensors: dict[str, torch.Tensor], swap: Literal["copy", "zero_copy"], swaps: int
) -> SwapTimes:
    from forgelite.policy.engine import build_engine
    from forgelite.policy.engine_loop import EngineLoop

    tokens = 4 * STEPS_BETWEEN * (swaps + 2)  # more than will be sampled: publishing takes some steps too
    engine = build_engine(
        folder,
        engine={"dtype": "float32", "max_model_len": tokens + 16, "max_num_seqs": SEQUENCES},
        seed=0,
        swap=swap,
    )
    timed = TimedEngine(engine)
    loop = EngineLoop(timed, seed=0)
    directory = ManifestsInMemory()
    trainer = WeightStore(directory=directory, run_id=f"bench-swap-{os.getpid()}", retain=1, served_in_place=1)
    policy = WeightStore(directory=directory, run_id=f"bench-swap-{os.getpid()}")
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    loop.submit([GroupRequest(request_id="all", prompt_ids=(1, 2, 3), sampling=sampling, n=SEQUENCES)])
    served, pauses, first_step = AsyncExitStack(), [], 0
    for version in range(1, swaps + 2):
        manifest = await trainer.publish(version, tensors)
        leases = AsyncExitStack()
        views = await leases.enter_async_context(policy.lease(manifest))
        report = await asyncio.to_thread(loop.update, version, lambda views=views: views, keep_kv=True)
        await served.aclose()
        served = leases
        if version == 1:
            first_step = len(timed.step_seconds)
        else:
            pauses.append(report.paused_s)
        await asyncio.to_thread(timed.wait_for_steps, STEPS_BETWEEN)
    steps = timed.step_seconds[first_step:]
    loop.close()
    await served.aclose()
    policy.close()
    trainer.close()
    return SwapTimes(pauses=pauses, steps=steps)


def _save_model(folder: Path, size: Mapping[str, int]) -> dict[str, torch.Tensor]:
    import transformers
    from safetensors.torch import load_file

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **size, head_dim=size["hidden_size"] // size["num_attention_heads"], tie_word_embeddings=True
    )
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return load_file(folder / "model.safetensors")
