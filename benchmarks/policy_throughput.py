"""What the service adds to an engine: tokens per second, latency, and work for the controller's event loop."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.policy_model import ENGINE, engine_process, requests_of
from benchmarks.policy_service import Served
from benchmarks.table import Row, spread
from forgelite.types import GroupRequest

RUNNING = (32, 128)  # requests at once
OPEN_REQUESTS = 2000
TICK_S = 0.005  # between two looks at the event loop's clock
SHORT = 8  # tokens of the one request whose latency is measured


@dataclass(kw_only=True, slots=True)
class _Rounds:
    """Seconds of the same batch on both sides, in alternation. Example: `_Rounds(service=[0.5], bare=[0.45])`."""

    service: list[float] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)


async def rows(served: Served, folder: Path, *, quick: bool) -> list[Row]:
    """`service_vs_bare_<n>`, `added_latency_ms` and `loop_lag_ms`.

    Args:
        served: a service of one replica.
        folder: of the model that it serves.
        quick: fewer and shorter rounds.
    """
    with engine_process(_serve_bare, folder) as bare:
        await asyncio.to_thread(bare.recv)  # its engine is built
        measured = [await _throughput(served.service, bare, running, quick=quick) for running in RUNNING]
        latency = await _alternate(served.service, bare, 1, SHORT, 20 if quick else 100)
    lags, seconds = await _loop_lags(served.service, tokens=16 if quick else 64)
    return [*measured, _latency_row(latency), _lag_row(lags, seconds)]


async def _throughput(service: Any, bare: Connection, running: int, *, quick: bool) -> Row:
    tokens, rounds = (64, 3) if quick else (256, 7)
    times = await _alternate(service, bare, running, tokens, rounds)
    ratios = [bare / ours for ours, bare in zip(times.service, times.bare, strict=True)]
    ours, theirs = (running * tokens / statistics.median(seconds) for seconds in (times.service, times.bare))
    note = f"{ours:,.0f} and {theirs:,.0f} tokens/s; by round {spread(ratios)}"
    return Row(case=f"service_vs_bare_{running}", value=ours / theirs, unit="x", goal=0.9, note=note)


async def _alternate(service: Any, bare: Connection, running: int, tokens: int, rounds: int) -> _Rounds:
    times = _Rounds()
    for number in range(-1, rounds):  # the first round warms both up
        requests = requests_of(running, tokens, f"{running}-{number}")
        ours = await _time_service(service, requests)
        bare.send(requests)
        theirs = await asyncio.to_thread(bare.recv)
        if number >= 0:
            times.service.append(ours)
            times.bare.append(theirs)
    return times


async def _time_service(service: Any, requests: Sequence[GroupRequest]) -> float:
    begin = time.perf_counter()
    groups = await asyncio.gather(*(service.generate_group(request) for request in requests))
    seconds = time.perf_counter() - begin
    sampled = sum(len(completion.token_ids) for group in groups for completion in group)
    if sampled != sum(request.sampling.max_tokens for request in requests):
        raise RuntimeError(f"the service has sampled {sampled} tokens, not what it was asked for")
    return seconds


async def _loop_lags(service: Any, *, tokens: int) -> tuple[list[float], float]:
    """How late the event loop woke up, in seconds, while `OPEN_REQUESTS` requests were open; and for how long."""
    lags: list[float] = []

    async def watch() -> None:
        while True:
            begin = time.perf_counter()
            await asyncio.sleep(TICK_S)
            lags.append(time.perf_counter() - begin - TICK_S)

    watching = asyncio.create_task(watch())
    try:
        seconds = await _time_service(service, requests_of(OPEN_REQUESTS, tokens, "open"))
    finally:
        watching.cancel()
    return lags, seconds


def _serve_bare(pipe: Connection, folder: Path) -> None:
    """The engine without loop, actor and service: add everything, step until all is finished."""
    from forgelite.policy.engine import build_engine

    engine = build_engine(folder, engine=ENGINE, seed=0)
    pipe.send("built")
    while True:
        requests: list[GroupRequest] = pipe.recv()
        begin = time.perf_counter()
        tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
        logprobs: dict[str, list[float]] = {request.request_id: [] for request in requests}
        for index, request in enumerate(requests):
            engine.add([request.request_id], request.prompt_ids, request.sampling, [index], "version 0")
        unfinished = len(requests)
        while unfinished:
            for sampled in engine.step():
                tokens[sampled.sequence_id] += sampled.token_ids
                logprobs[sampled.sequence_id] += sampled.logprobs
                unfinished -= sampled.finish_reason is not None
        pipe.send(time.perf_counter() - begin)


def _latency_row(times: _Rounds) -> Row:
    service, bare = (1e3 * statistics.median(seconds) for seconds in (times.service, times.bare))
    note = f"one request of {SHORT} tokens alone: {service:.1f} and {bare:.1f} ms"
    return Row(case="added_latency_ms", value=service - bare, unit="ms", note=note)


def _lag_row(lags: Sequence[float], seconds: float) -> Row:
    late = sorted(1e3 * lag for lag in lags)
    note = (
        f"{OPEN_REQUESTS:,} requests in {seconds:.1f} s; median {statistics.median(late):.1f}, most {late[-1]:.0f} ms"
    )
    return Row(case="loop_lag_ms", value=late[int(0.99 * (len(late) - 1))], unit="ms", note=note)
