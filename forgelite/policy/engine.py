"""The vLLM engine, built in this process and driven one step at a time.

The engine *core* is driven through vLLM's own in-process client, without `LLMEngine` around it. Measured on
the toy (128 requests of 6 tokens, 2 layers, d 128, one CPU thread), CPU milliseconds of the whole wave:

    one LLMEngine request per sample, DELTA output      84
    one LLMEngine request per group (n=8), DELTA        74
    core requests, a seed of its own for each member    63

Per-request Python is nearly all of it, and `LLMEngine` adds a renderer, a detokenizer and a logprob
dictionary per token that a policy has no use for. With n=8 vLLM also chooses the members' seeds, and not well
(see `seeds.py`).
"""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from forgelite.errors import ConfigError
from forgelite.policy import cpu_shims
from forgelite.policy.admission import Limits
from forgelite.policy.device_staging import DeviceStaging
from forgelite.policy.engine_protocol import Sampled
from forgelite.policy.tensor_parallel import Rank, check_ranks, executor_of, unlink_shared_memory
from forgelite.policy.weights_loading import CheckpointSchema, prepare_copy, read_schema
from forgelite.policy.zero_copy import bind, prepare_swap
from forgelite.types import SamplingParams

log = logging.getLogger(__name__)

_KV_BYTES_ON_CPU = 1 << 30  # the most that the KV cache takes on a CPU unless `policy.engine` says otherwise
_OWN_ARGUMENTS = {  # EngineArgs that forgelite sets: what they guarantee does not survive another value
    "model": "model.path",
    "seed": "run.seed",
    "skip_tokenizer_init": "a policy takes and gives token ids",
    "logprobs_mode": "behaviour logprobs are those of the distribution sampled from",
    "async_scheduling": "a step that overlaps the next one would straddle an update",
    "disable_log_stats": "forgelite keeps its own statistics",
    "distributed_executor_backend": "policy.engine.tensor_parallel_size says how many processes a replica has",
}
Swap = Literal["copy", "zero_copy"]
_NOT_SPREAD = ("pipeline_parallel_size", "data_parallel_size", "nnodes")


@dataclass(kw_only=True, slots=True, frozen=True)
class Capabilities:
    """What was built: decided here, logged once, reported to the controller.

    Example: `Capabilities(vocab_size=128, max_model_len=512, max_num_seqs=128, dtype="float32", device="cpu",
    attention_backend="CPU_ATTN", kv_cache_tokens=64000, weights_swap="zero_copy")`.
    """

    vocab_size: int
    max_model_len: int  # tokens
    max_num_seqs: int  # sequences in one step
    dtype: str
    device: str
    attention_backend: str
    kv_cache_tokens: int  # tokens that fit in the KV cache
    weights_swap: Swap  # how new weights come into use


class VllmEngine:
    """A vLLM engine core in this process. Not thread-safe: `EngineLoop` calls it from one thread only."""

    def __init__(self, client: Any, config: Any, schema: CheckpointSchema, *, swap: Swap) -> None:
        """Wrap a running core; `build_engine` is the way to get one.

        Args:
            client: vLLM's `InprocClient`.
            config: the `VllmConfig` it was built from.
            schema: of the checkpoint that it started from.
            swap: copy new weights into the parameters, or make the parameters views of them (CPU only).

        Raises:
            ConfigError: this model's parameters cannot be views.
        """
        self._client = client
        self._scheduler = client.engine_core.scheduler
        self._model_runner = client.engine_core.model_executor.driver_worker.worker.model_runner
        self._schema = schema
        device = self._model_runner.device
        if device.type == "cpu":
            cpu_shims.hold_generators_of_partial_prefills(self._model_runner)
        self._staging = DeviceStaging(device) if device.type == "cuda" else None
        self._bindings = bind(self._model_runner.get_model(), schema) if swap == "zero_copy" else None
        self.capabilities = _capabilities(config, swap)
        self.limits = Limits(vocab_size=self.capabilities.vocab_size, max_model_len=self.capabilities.max_model_len)

    def add(
        self,
        sequence_ids: Iterable[str],
        prompt_ids: Iterable[int],
        sampling: SamplingParams,
        seeds: Iterable[int],
        cache_salt: str,
    ) -> None:
        """Queue one sequence per id, all with the same prompt.

        Args:
            sequence_ids: unique among the unfinished ones.
            prompt_ids: checked by `admission.rejection`; a bad id would kill the engine.
            sampling: for all of them; its own seed is not looked at.
            seeds: one per sequence.
            cache_salt: sequences share cached prefixes only with those of the same salt.
        """
        from vllm.v1.engine import EngineCoreRequest

        template = _vllm_sampling(sampling)
        prompt, now = list(prompt_ids), time.time()
        for sequence_id, seed in zip(sequence_ids, seeds, strict=True):
            params = copy.copy(template)
            params.seed = seed
            self._client.add_request(
                EngineCoreRequest(
                    request_id=sequence_id,
                    prompt_token_ids=prompt,
                    mm_features=None,
                    sampling_params=params,
                    pooling_params=None,
                    arrival_time=now,
                    lora_request=None,
                    cache_salt=cache_salt,
                    data_parallel_rank=None,
                )
            )

    def abort(self, sequence_ids: Iterable[str]) -> None:
        """Drop sequences. Nothing more is emitted for them; unknown ids are ignored."""
        self._client.abort_requests(list(sequence_ids))

    def step(self) -> list[Sampled]:
        """One forward pass over everything that is scheduled.

        Nothing is in flight when it returns, because scheduling is synchronous: whatever happens next happens
        between two steps.
        """
        return [
            Sampled(
                output.request_id,
                output.new_token_ids,
                [] if output.new_logprobs is None else output.new_logprobs.logprobs[:, 0].tolist(),
                None if output.finish_reason is None else str(output.finish_reason),
            )
            for output in self._client.get_output().outputs
        ]

    def queue_lengths(self) -> tuple[int, int]:
        """How many sequences are being computed, and how many wait for a place."""
        return self._scheduler.get_request_counts()

    def prepare_weights(self, tensors: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        """Check a complete set of weights, by checkpoint name; returns what puts it in use between two steps.

        With `swap="zero_copy"` the tensors must stay as they are until another set is in use.

        Raises:
            WeightMismatch: the set does not fit; nothing was changed.
        """
        if self._bindings is not None:
            return prepare_swap(self._model_runner.get_model(), self._bindings, tensors, self._schema)
        if self._staging is not None:
            self._schema.check(tensors)
            tensors = self._staging.stage(tensors)
        return prepare_copy(self._model_runner, tensors, self._schema)

    def drop_kv(self) -> None:
        """Forget every cached key and value; running sequences are prefilled again from their tokens.

        Raises:
            RuntimeError: vLLM kept some of it.
        """
        if not self._client.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM did not reset its prefix cache, which holds keys of the old weights")

    def close(self) -> None:
        """Free the engine. A process that has had one can build the next."""
        from vllm.distributed import cleanup_dist_env_and_memory

        self._client.shutdown()
        self._client = self._scheduler = self._model_runner = None
        if self._staging is not None:
            self._staging.close()
        cleanup_dist_env_and_memory()


def build_engine(
    model_path: str | Path, *, engine: Mapping[str, Any], seed: int, swap: Swap = "copy", rank: Rank | None = None
) -> VllmEngine:
    """Build a vLLM engine in this process, which must have been started with `policy_environment`.

    On a CPU it is eager, its linear layers are live, and its KV cache holds what `max_num_seqs` sequences of
    `max_model_len` tokens need, up to 1 GiB, unless `engine` says otherwise.

    Args:
        model_path: a Hugging Face folder: config.json and safetensors files.
        engine: names and values of vLLM's EngineArgs (`policy.engine.*`).
        seed: of the engine's own generator; sequences have seeds of their own.
        swap: see `VllmEngine` (`weights.swap`).
        rank: of this process in a replica of several, which all build theirs at the same time; None: one process.

    Raises:
        ConfigError: the environment, an argument or the folder is wrong; names `policy.engine.<name>`,
            `model.path` or `weights.swap`.
    """
    _check_environment()
    _check_arguments(engine)
    check_ranks(engine, swap, rank)
    architectures = _read_architectures(Path(model_path))

    from vllm.platforms import current_platform
    from vllm.v1.engine.core_client import InprocClient
    from vllm.v1.executor import Executor

    on_cpu = current_platform.is_cpu()
    if swap == "zero_copy" and not on_cpu:
        raise ConfigError("weights.swap=zero_copy needs a policy on a CPU; set weights.swap=copy or auto")
    if on_cpu:
        cpu_shims.allow_amx()
        cpu_shims.keep_linears_live()
    cpu_shims.register_architecture(architectures)

    config = _engine_config(model_path, engine, seed, on_cpu, spread=rank is not None)
    if on_cpu and not {"num_gpu_blocks_override", "kv_cache_memory_bytes"} & engine.keys():
        config.cache_config.num_gpu_blocks_override = _kv_blocks(config, _KV_BYTES_ON_CPU)
    model = config.model_config
    schema = read_schema(
        model_path,
        tied_head=bool(getattr(model.hf_text_config, "tie_word_embeddings", False)),
        engine_dtype=model.dtype,
    )
    executor = Executor.get_class(config) if rank is None else executor_of(rank)
    client = InprocClient(config, executor, log_stats=False)
    if rank is not None:
        unlink_shared_memory(rank)
    if client.engine_core.batch_queue is not None:
        client.shutdown()
        raise ConfigError(
            "policy.engine: these settings keep several steps in flight, so that an update could not fall "
            "between two of them; leave out pipeline parallelism"
        )
    built = VllmEngine(client, config, schema, swap=swap)
    log.info("policy engine: %s", built.capabilities)
    return built


def _check_environment() -> None:
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "0":
        raise ConfigError(
            "the policy process was not started with VLLM_ENABLE_V1_MULTIPROCESSING=0: spawn it with "
            "forgelite.policy.environment.policy_environment()"
        )


def _check_arguments(engine: Mapping[str, Any]) -> None:
    from vllm import EngineArgs

    known = {field.name for field in dataclasses.fields(EngineArgs)}
    for name, value in engine.items():
        if name in _OWN_ARGUMENTS:
            raise ConfigError(f"policy.engine.{name} is set by forgelite ({_OWN_ARGUMENTS[name]}): leave it out")
        if name not in known:
            raise ConfigError(f"policy.engine.{name}: vLLM's EngineArgs has no such argument")
        if name in _NOT_SPREAD and value != 1:
            raise ConfigError(
                f"policy.engine.{name}={value}: a replica is spread over devices of one host by tensor parallelism "
                "only (policy.engine.tensor_parallel_size), so it must be 1"
            )
    if "kv_cache_memory_bytes" in engine and os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
        raise ConfigError(
            "policy.engine.kv_cache_memory_bytes would be overwritten by the environment variable "
            "VLLM_CPU_KVCACHE_SPACE: unset one of them"
        )


def _read_architectures(model_path: Path) -> list[str]:
    file = model_path / "config.json"
    if not file.is_file():
        raise ConfigError(f"model.path={model_path} has no config.json: it must be a Hugging Face folder")
    return json.loads(file.read_text()).get("architectures") or []


def _engine_config(model_path: str | Path, engine: Mapping[str, Any], seed: int, on_cpu: bool, *, spread: bool) -> Any:
    from vllm import EngineArgs

    defaults: dict[str, Any] = {"use_tqdm_on_load": False}
    if on_cpu:
        defaults |= {"enforce_eager": True, "kv_cache_memory_bytes": _KV_BYTES_ON_CPU}
    if spread:
        defaults["distributed_executor_backend"] = "external_launcher"
    arguments = defaults | dict(engine)
    try:
        return EngineArgs(
            model=str(model_path),
            seed=seed,
            skip_tokenizer_init=True,
            logprobs_mode="processed_logprobs",
            async_scheduling=False,
            disable_log_stats=True,
            **arguments,
        ).create_engine_config()
    except (TypeError, ValueError) as error:  # vLLM's and pydantic's validation errors are ValueErrors
        named = ", ".join(f"policy.engine.{name}={value!r}" for name, value in engine.items())
        raise ConfigError(f"vLLM refuses model.path={model_path} with {named or 'its defaults'}: {error}") from error


def _kv_blocks(config: Any, limit_bytes: int) -> int:
    """How many KV blocks `max_num_seqs` full sequences need, or as many as fit into `limit_bytes`.

    vLLM itself would always take the whole limit: on a tiny model 1 GiB where 70 MB are enough.
    """
    model, parallel, block = config.model_config, config.parallel_config, config.cache_config.block_size
    per_token = 2 * model.get_num_layers(parallel) * model.get_num_kv_heads(parallel) * model.get_head_size()
    fits = limit_bytes // (per_token * block * model.dtype.itemsize)
    needed = config.scheduler_config.max_num_seqs * math.ceil(model.max_model_len / block)
    return max(2, min(needed + 1, fits))  # one block is vLLM's null block


def _vllm_sampling(sampling: SamplingParams) -> Any:
    from vllm import SamplingParams as VllmSamplingParams

    return VllmSamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        # The request's own stop tokens are the only ones: the core adds no end-of-sequence token of the
        # checkpoint.
        stop_token_ids=[] if sampling.ignore_eos else list(sampling.stop_token_ids),
        ignore_eos=True,
        logprobs=0,  # of the sampled token only
        detokenize=False,
    )


def _capabilities(config: Any, swap: Swap) -> Capabilities:
    layers = config.compilation_config.static_forward_context.values()
    backends = {layer.attn_backend.get_name() for layer in layers if getattr(layer, "attn_backend", None) is not None}
    cache = config.cache_config
    return Capabilities(
        vocab_size=config.model_config.get_vocab_size(),
        max_model_len=config.model_config.max_model_len,
        max_num_seqs=config.scheduler_config.max_num_seqs,
        dtype=str(config.model_config.dtype).removeprefix("torch."),
        device=config.device_config.device_type,
        attention_backend="+".join(sorted(backends)),
        kv_cache_tokens=cache.num_gpu_blocks * cache.block_size,
        weights_swap=swap,
    )
