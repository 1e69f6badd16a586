"""One engine spread over several processes: tensor parallelism inside a replica.

vLLM's `external_launcher` does the arithmetic: every rank builds an engine with a scheduler of its own, and
ranks that are given the same commands schedule the same steps and sample the same tokens. That the commands are the
same is the business of `lockstep` (rank 0) and `follower` (the others). This module holds where the ranks meet,
and what vLLM needs to be told.

The ranks of a replica are processes of one host, with one device each.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from forgelite.errors import ConfigError

_LOOPBACK = "127.0.0.1"
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(kw_only=True, slots=True, frozen=True)
class Rendezvous:
    """Where the ranks of one replica meet. One for each life of a replica.

    Example: `Rendezvous(name="9f3c01aa", ranks=2, collective_port=41001, secret=b"16 random bytes",
    build_timeout_s=120.0, call_timeout_s=60.0)`.
    """

    name: str  # no other replica of this host has it
    ranks: int
    collective_port: int  # of torch.distributed
    secret: bytes = field(repr=False)  # keeps other programs of this host from sending commands
    build_timeout_s: float  # until all engines are built
    call_timeout_s: float  # until all ranks have done one step or one swap

    @property
    def command_address(self) -> str:
        """Where rank 0 sends commands from: a socket without a file, which is gone with its process."""
        return f"\0forgelite-ranks-{self.name}"


@dataclass(kw_only=True, slots=True, frozen=True)
class Rank:
    """One process of a replica.

    Example: `Rank(index=1, rendezvous=rendezvous)` of two.
    """

    index: int
    rendezvous: Rendezvous


def new_rendezvous(ranks: int, *, build_timeout_s: float, call_timeout_s: float) -> Rendezvous:
    """A meeting place for `ranks` processes on this host.

    The port is free now; another program may take it before the ranks do, which then fail to start.

    Args:
        ranks: at least 2.
        build_timeout_s: deadline for the start of all engines, in seconds (`mesh.setup_timeout_s`).
        call_timeout_s: deadline of one step or swap on all ranks, in seconds.
    """
    with socket.create_server((_LOOPBACK, 0)) as probe:
        collective_port = probe.getsockname()[1]
    return Rendezvous(
        name=secrets.token_hex(4),
        ranks=ranks,
        collective_port=collective_port,
        secret=secrets.token_bytes(16),
        build_timeout_s=build_timeout_s,
        call_timeout_s=call_timeout_s,
    )


def tensor_parallel_size(engine: Mapping[str, Any]) -> int:
    """How many processes an engine of these arguments (`policy.engine`) is spread over.

    Raises:
        ConfigError: not a positive whole number.
    """
    size = engine.get("tensor_parallel_size", 1)
    if type(size) is not int or size < 1:
        raise ConfigError(f"policy.engine.tensor_parallel_size={size!r} must be a whole number of at least 1")
    return size


def check_ranks(engine: Mapping[str, Any], swap: Literal["copy", "zero_copy"], rank: Rank | None) -> None:
    """Compare what the engine is asked to be with the processes that there are.

    Raises:
        ConfigError: names the key.
    """
    size = tensor_parallel_size(engine)
    ranks = 1 if rank is None else rank.rendezvous.ranks
    if size != ranks:
        raise ConfigError(
            f"policy.engine.tensor_parallel_size={size} needs as many processes in the replica, which has {ranks}"
        )
    if size > 1 and swap == "zero_copy":
        raise ConfigError(
            f"weights.swap=zero_copy with policy.engine.tensor_parallel_size={size}: a rank computes with slices of "
            "the tensors, which are no views of whole rows; set weights.swap=copy or auto"
        )


def executor_of(rank: Rank) -> type:
    """The vLLM executor of one rank: `external_launcher`, with a meeting place of its own for every replica.

    vLLM names the shared memory of its CPU collectives after the last part of the address. For `env://`, which
    it would use, that part is the same in every replica of a host, and the second replica fails to start
    ("create shm in SHMManager failed. errno: 17"), as does one that is started again after a kill.
    """
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    rendezvous = rank.rendezvous

    class RankExecutor(ExecutorWithExternalLauncher):
        def _distributed_args(self) -> tuple[str, int, int]:
            # torch ignores the query; vLLM makes it part of the name.
            address = f"tcp://{_LOOPBACK}:{rendezvous.collective_port}?replica={rendezvous.name}"
            return address, rank.index, rank.index

    return RankExecutor


def unlink_shared_memory(rank: Rank) -> None:
    """Remove the names of the shared memory of vLLM's collectives, once all ranks have mapped it.

    The memory lives for as long as the processes that map it, so that nothing is left after a kill -9. On a GPU there
    is none.
    """
    for file in _SHARED_MEMORY.glob(f"*replica={rank.rendezvous.name}-*_{rank.index}"):
        file.unlink(missing_ok=True)
