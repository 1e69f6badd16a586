"""The endpoint on a port, in the event loop of the controller: no second process, nothing left when the block ends."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
from collections.abc import AsyncIterator, Iterator

import uvicorn
from fastapi import FastAPI

from forgelite.errors import ConfigError, ForgeliteError
from forgelite.observe.gates import within

logger = logging.getLogger(__name__)

_KEEP_ALIVE_S = 60  # longer than clients keep theirs (httpx: 5 s), so that none is closed just when it is used again
STOP_S = 5.0  # how long answers under way may take when the endpoint stops; then they are cancelled


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: Ctrl-C belongs to the app."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()


@contextlib.asynccontextmanager
async def serve(app: FastAPI, *, host: str, port: int, start_timeout_s: float = 30.0) -> AsyncIterator[str]:
    """Serve `app` while the block runs; gives its address, such as `http://127.0.0.1:8000`.

    Args:
        app: see `create_app`.
        host: address to bind.
        port: 0 takes a free one.
        start_timeout_s: deadline of the start.

    Raises:
        ConfigError: the address cannot be bound.
        ForgeliteError: the server ended while the block ran; the block is cancelled.
    """
    bound = _bind(host, port)
    settings = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(STOP_S),
    )
    server = _Server(settings)
    try:
        async with asyncio.timeout(None) as block:
            task = asyncio.create_task(server.serve(sockets=[bound]), name="openai endpoint")
            task.add_done_callback(lambda _: None if server.should_exit else block.reschedule(0))
            try:
                await within(start_timeout_s, server.listening.wait(), "the endpoint to listen")
                yield _address(host, bound.getsockname()[1])
            finally:
                server.should_exit = True
                with contextlib.suppress(Exception):
                    await within(2 * STOP_S, task, "the endpoint to stop")
    except TimeoutError:
        if not block.expired():
            raise
        raise ForgeliteError(f"the endpoint at {host}:{port} ended by itself: {_end_of(task)}") from None
    finally:
        bound.close()


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to what is bound to `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(
            f"endpoint.host={host} endpoint.port={port} cannot be bound: {error.strerror or error}"
        ) from None


def _address(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _end_of(task: asyncio.Task[None]) -> str:
    if not task.done() or task.cancelled():
        return "it was cancelled"
    return repr(task.exception()) if task.exception() else "it returned"
