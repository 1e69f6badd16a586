"""Real vLLM engines for the policy tests: tiny checkpoints, and a process that holds one engine at a time.

vLLM changes torch for the whole process that imports it, and reads its environment when the interpreter
starts. So the engine lives in a child, as in a run, and the tests talk to its `EngineLoop` through a proxy.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from multiprocessing import get_context
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from safetensors.torch import load_file

from forgelite.policy import cpu_shims
from forgelite.policy.environment import policy_environment
from forgelite.types import Completion, Failure, GroupRequest, SamplingParams

VOCABULARY = 96
TOLERANCE = 1e-4  # between vLLM and a Hugging Face forward pass, both in float32
ENGINE = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 16}

_COMMON = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,  # vLLM's CPU attention supports 32 and 64, not 16 or 24
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,  # wide, so that two random checkpoints disagree about every token
}
_ARCHITECTURES = {
    "llama": lambda: transformers.LlamaConfig(**_COMMON, intermediate_size=96, tie_word_embeddings=False),
    "qwen3_tied": lambda: transformers.Qwen3Config(**_COMMON, intermediate_size=96, tie_word_embeddings=True),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **_COMMON,
        intermediate_size=96,
        moe_intermediate_size=48,  # the expert kernel pads it to 64
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    ),
}
ARCHITECTURES = tuple(_ARCHITECTURES)


def save_checkpoint(folder: Path, architecture: str, seed: int) -> Path:
    """A Hugging Face folder with random float32 weights."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(_ARCHITECTURES[architecture](), dtype=torch.float32)
    model.save_pretrained(folder)
    return folder


def read_checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint. Also what an update loads, in the engine's process."""
    return load_file(Path(folder) / "model.safetensors")


@torch.no_grad()
def reference_logprobs(folder: Path, completion: Completion) -> list[float]:
    """What a fresh forward pass says of the tokens of a completion that was sampled at temperature 1."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = len(completion.prompt_ids)
    ids = torch.tensor([[*completion.prompt_ids, *completion.token_ids]])
    logprobs = model(ids).logits[0, prompt - 1 : -1].log_softmax(-1)
    return logprobs.gather(-1, ids[0, prompt:, None])[:, 0].tolist()


def furthest(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The largest difference between two lists of logprobs."""
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


def group(request_id: str, *, n: int = 1, prompt: Sequence[int] = (3, 1, 4, 1, 5), **sampling: Any) -> GroupRequest:
    """A request for `n` completions of a short prompt."""
    params = SamplingParams(**{"max_tokens": 8, **sampling})
    return GroupRequest(request_id=request_id, prompt_ids=tuple(prompt), sampling=params, n=n)


def _pack_linears() -> None:
    """Undo `keep_linears_live`, which an engine before may have left behind in this process."""
    import vllm.model_executor.layers.utils as layer_utils

    dispatch = layer_utils.dispatch_cpu_unquantized_gemm
    layer_utils.dispatch_cpu_unquantized_gemm = getattr(dispatch, "replaces", dispatch)


_WITHOUT = {  # what stands in for a shim that is left out
    "allow_amx": lambda: None,
    "keep_linears_live": _pack_linears,
    "unpacked_experts": lambda model: nullcontext(),
    "register_architecture": lambda architectures: None,
    "hold_generators_of_partial_prefills": lambda model_runner: None,
}
_SHIMS = {name: getattr(cpu_shims, name) for name in _WITHOUT}


def _as_it_is(engine: Any) -> Any:
    return engine


class EngineHost:
    """Lives in the child process. Builds an engine and forwards to its loop."""

    def build(
        self,
        model_path: Path,
        engine: Mapping[str, Any],
        *,
        seed: int = 0,
        without: str | None = None,
        swap: Literal["copy", "zero_copy"] = "copy",
        wrap: Callable[[Any], Any] = _as_it_is,
    ) -> Any:
        """Build an engine and start its loop, `without` one of the CPU shims, and with what `wrap` makes of it."""
        from forgelite.policy.engine import build_engine
        from forgelite.policy.engine_loop import EngineLoop
        from forgelite.policy.stop_texts import StopTexts

        for name, shim in _SHIMS.items():
            setattr(cpu_shims, name, _WITHOUT[name] if name == without else shim)
        built = build_engine(model_path, engine=engine, seed=seed, swap=swap)
        self._loop = EngineLoop(wrap(built), seed=seed, stop_texts=StopTexts(model_path))
        return built.capabilities

    def submit(self, requests: Sequence[GroupRequest]) -> list[Failure | None]:
        return self._loop.submit(requests)

    def collect(self, timeout_s: float) -> Any:
        return self._loop.collect(timeout_s)

    def abort(self, request_ids: Sequence[str]) -> None:
        self._loop.abort(request_ids)

    def update(self, version: int, load: Callable[[], Mapping[str, torch.Tensor]], **options: Any) -> Any:
        return self._loop.update(version, load, **options)

    def stats(self) -> Any:
        return self._loop.stats()

    def close(self) -> None:
        self._loop.close()

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of a test module in this process."""
        return function(*args)

    def run_with_loop(self, function: Callable[..., Any], *args: Any) -> Any:
        """The same, with the engine loop as its first argument."""
        return function(self._loop, *args)


class _Processes(BaseManager):
    """Starts the child; a class of its own, because what is registered belongs to the class."""


_Processes.register("EngineHost", EngineHost)


@contextmanager
def engine_process(**environment: str) -> Iterator[EngineHost]:
    """A fresh process with the environment of a policy, and a proxy of its `EngineHost`."""
    wanted = policy_environment("cpu") | environment
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        processes = _Processes(ctx=get_context("spawn"))
        processes.start()
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
    try:
        yield processes.EngineHost()
    finally:
        processes.shutdown()


def sample(host: EngineHost, *requests: GroupRequest, timeout_s: float = 60.0) -> list[Any]:
    """The outcomes of requests, in their order; a refused request gives its failure."""
    outcomes = {
        request.request_id: refusal
        for request, refusal in zip(requests, host.submit(list(requests)), strict=True)
        if refusal is not None
    }
    while len(outcomes) < len(requests):
        results = host.collect(timeout_s)
        assert results, f"only {sorted(outcomes)} were finished within {timeout_s} s"
        outcomes.update({result.request_id: result.outcome for result in results})
    return [outcomes[request.request_id] for request in requests]


def wait_for_tokens(host: EngineHost, count: int) -> None:
    """Return when the engine has sampled `count` tokens more than now."""
    target = host.stats().generated_tokens + count
    while host.stats().generated_tokens < target:
        pass
