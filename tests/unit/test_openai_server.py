"""The endpoint on a real port: begins and ends with its block."""

from __future__ import annotations

import asyncio
import signal

import httpx
import pytest

from forgelite.errors import ConfigError, ForgeliteError
from forgelite.policy.openai import server
from tests.unit.openai_fakes import make_endpoint


def app_of(endpoint):
    return endpoint.client._transport.app


async def test_it_answers_while_its_block_runs_and_leaves_signals_alone():
    before = signal.getsignal(signal.SIGINT)
    async with server.serve(app_of(make_endpoint()), host="127.0.0.1", port=0) as address:
        assert signal.getsignal(signal.SIGINT) is before
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"{address}/health")).json()["status"] == "ok"
    async with httpx.AsyncClient() as client:
        with pytest.raises(httpx.ConnectError):
            await client.get(f"{address}/health")


async def test_a_port_that_is_taken_is_one_clear_error():
    async with server.serve(app_of(make_endpoint()), host="127.0.0.1", port=0) as address:
        port = int(address.rpartition(":")[2])
        again = server.serve(app_of(make_endpoint()), host="127.0.0.1", port=port)
        with pytest.raises(ConfigError, match=rf"endpoint\.port={port} cannot be bound"):
            await again.__aenter__()


async def test_answers_under_way_do_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server, "STOP_S", 1)
    endpoint = make_endpoint("four", waits=asyncio.Event())
    async with httpx.AsyncClient(timeout=30) as client:
        async with server.serve(app_of(endpoint), host="127.0.0.1", port=0) as address:
            body = {"model": "policy", "prompt": "x"}
            asked = asyncio.create_task(client.post(f"{address}/v1/completions", json=body))
            await asyncio.wait_for(endpoint.policy.asked.wait(), 20)
        outcome = (await asyncio.wait_for(asyncio.gather(asked, return_exceptions=True), 20))[0]
    assert isinstance(outcome, Exception) or outcome.status_code >= 499
    assert endpoint.policy.aborted == ["openai0"]


async def test_a_server_that_ends_by_itself_ends_the_block():
    async def serve_until_it_ends() -> None:
        async with server.serve(app_of(make_endpoint()), host="127.0.0.1", port=0):
            (task,) = (t for t in asyncio.all_tasks() if t.get_name() == "openai endpoint")
            task.cancel()
            await asyncio.wait_for(asyncio.Event().wait(), 10)

    with pytest.raises(ForgeliteError, match="ended by itself"):
        await serve_until_it_ends()


@pytest.mark.parametrize(
    ("host", "loopback"), [("127.0.0.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), ("gpu1", False)]
)
def test_what_only_this_machine_can_reach(host: str, loopback: bool):
    assert server.is_loopback(host) is loopback
