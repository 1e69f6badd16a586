"""The model that the policy's benchmark serves, the engine's settings, and a process like a policy's own."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from forgelite.mesh.environment import station_environment
from forgelite.policy.environment import policy_environment
from forgelite.types import GroupRequest, SamplingParams

MODEL = "the toy's model: a Llama of 2 layers, 128 wide, 0.4M parameters, float32"
MAX_MODEL_LEN = 1024
ENGINE = {"dtype": "float32", "max_model_len": MAX_MODEL_LEN, "max_num_seqs": 128}
PROMPT_TOKENS = 16
_VOCABULARY = 40  # ids below this are letters and digits of the toy


def save_model(folder: Path, *, seed: int = 0) -> Path:
    """The toy's model with random weights and room for longer sequences, and its tokenizer, as a folder."""
    from apps.toy.main import build_model, build_tokenizer

    model = build_model(seed)
    model.config.max_position_embeddings = MAX_MODEL_LEN
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def prompt_of(index: int) -> tuple[int, ...]:
    """A prompt of `PROMPT_TOKENS` tokens, another for every index."""
    return tuple(2 + (7 * index + 3 * place) % _VOCABULARY for place in range(PROMPT_TOKENS))


def requests_of(count: int, tokens: int, name: str) -> list[GroupRequest]:
    """`count` requests of one completion each, all of exactly `tokens` tokens."""
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return [
        GroupRequest(request_id=f"{name}/{index}", prompt_ids=prompt_of(index), sampling=sampling)
        for index in range(count)
    ]


def replica_environment() -> dict[str, str]:
    """The environment of a policy's process on a CPU."""
    return station_environment(**policy_environment("cpu"))


@contextmanager
def engine_process(target: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    """A process with the environment of a policy that runs `target(pipe, *arguments)`; killed at the end."""
    environment = replica_environment()
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
    try:
        process.start()
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
    theirs.close()
    try:
        yield ours
    finally:
        process.kill()
        process.join()
