"""Requests per second of the OpenAI endpoint beside those of vLLM's own server: same model, same load, same client."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.policy_model import ENGINE, MAX_MODEL_LEN, prompt_of, replica_environment
from benchmarks.table import Row, spread

REQUESTS = 512
AT_ONCE = 32
TOKENS = 16
_MODEL_NAME = "policy"
# By vLLM's server alone, so not by forgelite.
_NEEDED = ("watchfiles", "prometheus-fastapi-instrumentator", "model-hosting-container-standards")
_KV_BYTES = 1 << 30
_START_S = 300.0
_ASK_EVERY_S = 0.25


def rows(folder: Path, *, quick: bool) -> list[Row]:
    """`endpoint_vs_vllm`; with `quick` nothing, because vLLM's server takes longer to start than all the rest."""
    if quick:
        return []
    missing = [name for name in _NEEDED if importlib.util.find_spec(name.replace("-", "_")) is None]
    if missing:
        note = f"vLLM's server needs: pip install {' '.join(missing)}"
        return [Row(case="endpoint_vs_vllm", value=None, unit="x", note=note)]
    return [asyncio.run(_compare(folder, rounds=5))]


async def _compare(folder: Path, *, rounds: int) -> Row:
    async with _server(_ours(folder)) as ours, _server(_theirs(folder)) as theirs:
        seconds: dict[str, list[float]] = {ours: [], theirs: []}
        for number in range(-1, rounds):  # the first round warms both up
            for address in seconds:
                measured = await _load(address)
                if number >= 0:
                    seconds[address].append(measured)
    ratios = [b / a for a, b in zip(seconds[ours], seconds[theirs], strict=True)]
    mine, other = (REQUESTS / statistics.median(seconds[address]) for address in (ours, theirs))
    return Row(
        case="endpoint_vs_vllm",
        value=mine / other,
        unit="x",
        note=f"{mine:.0f} and {other:.0f} requests/s of {TOKENS} tokens, {AT_ONCE} at once; by round {spread(ratios)}",
    )


def _ours(folder: Path) -> list[str]:
    config = {
        "model": {"path": str(folder)},
        "policy": {"engine": ENGINE, "sampling": {"max_tokens": TOKENS}},
        "endpoint": {"model_name": _MODEL_NAME},
    }
    file = folder / "serve.yaml"
    file.write_text(json.dumps(config))  # JSON is YAML too
    return [sys.executable, "-m", "apps.serve.main", "--config", str(file), "endpoint.port={port}"]


def _theirs(folder: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)),
        *("--served-model-name", _MODEL_NAME, "--dtype", "float32", "--enforce-eager"),
        *("--kv-cache-memory-bytes", str(_KV_BYTES)),  # else it takes nearly all of the memory
        *("--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(ENGINE["max_num_seqs"])),
        *("--disable-uvicorn-access-log", "--host", "127.0.0.1", "--port", "{port}"),
    ]


@asynccontextmanager
async def _server(command: Sequence[str]) -> AsyncIterator[str]:
    """A server in a process group of its own, from its first healthy answer on; killed at the end."""
    import aiohttp

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as output:
        process = await asyncio.create_subprocess_exec(
            *(part.replace("{port}", str(port)) for part in command),
            env=os.environ | _server_environment(),
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            async with aiohttp.ClientSession() as session:
                await _wait_until_healthy(session, address, process)
            yield address
        except _NotHealthy as error:
            output.seek(0)
            raise RuntimeError(f"{command[2]} {error}: {output.read()[-2000:].decode()}") from error
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


class _NotHealthy(Exception):
    """A server that does not come up."""


def _server_environment() -> Mapping[str, str]:
    """That of a policy's process, but vLLM's server has its engine in a process of its own, as it is by default."""
    environment = dict(replica_environment())
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    return environment


async def _wait_until_healthy(session: Any, address: str, process: asyncio.subprocess.Process) -> None:
    import aiohttp

    deadline = time.monotonic() + _START_S
    while True:
        if process.returncode is not None:
            raise _NotHealthy(f"ended with {process.returncode}")
        try:
            async with session.get(f"{address}/health") as answer:
                if answer.status == 200:
                    return
        except aiohttp.ClientConnectionError:
            pass
        if time.monotonic() > deadline:
            raise _NotHealthy(f"was not healthy within {_START_S:g} s")
        await asyncio.sleep(_ASK_EVERY_S)


async def _load(address: str) -> float:
    """Send `REQUESTS` requests, `AT_ONCE` at a time; gives the seconds until the last answer."""
    import aiohttp

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=AT_ONCE)) as session:

        async def ask(index: int) -> None:
            body = {
                "model": _MODEL_NAME,
                "prompt": list(prompt_of(index)),
                "max_tokens": TOKENS,
                "temperature": 1.0,
                "ignore_eos": True,
            }
            async with session.post(f"{address}/v1/completions", json=body) as answer:
                usage = (await answer.json())["usage"]
                if usage["completion_tokens"] != TOKENS:
                    raise RuntimeError(f"{address} answered with {usage}")

        begin = time.perf_counter()
        await asyncio.gather(*(ask(index) for index in range(REQUESTS)))
        return time.perf_counter() - begin
