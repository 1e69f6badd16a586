"""Several trainer processes: who they are, which rows each takes, and how their numbers are added up."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(kw_only=True, slots=True, frozen=True)
class Rank:
    """One process of the trainer, and where they all meet.

    Example: `Rank(rank=1, world_size=2, local_rank=1, master_addr="127.0.0.1", master_port=29500)`.
    """

    rank: int
    world_size: int
    local_rank: int
    master_addr: str
    master_port: int

    def export(self) -> None:
        """Set the environment variables from which torch.distributed reads all this."""
        os.environ |= {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


@dataclass(kw_only=True, slots=True, frozen=True)
class Share:
    """Which part of every batch this process trains."""

    index: int  # of the data-parallel rank
    count: int  # of data-parallel ranks
    group: dist.ProcessGroup | None  # the data-parallel ranks; None: this process alone


ALONE = Share(index=0, count=1, group=None)


def exchange(value: Any) -> list[Any]:
    """Say something to all ranks; give what every rank said, by rank. A collective."""
    heard: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(heard, value)
    return heard


def total(share: Share, sums: dict[str, torch.Tensor], maxima: dict[str, torch.Tensor]) -> dict[str, float]:
    """The sums and maxima over all ranks, as `sum/<name>` and `max/<name>`. One wait for the device.

    A collective; every rank has the same names.
    """
    names = [f"sum/{name}" for name in sums] + [f"max/{name}" for name in maxima]
    added = torch.stack([value.double() for value in sums.values()])
    largest = torch.stack([value.double() for value in maxima.values()]) if maxima else added[:0]
    if share.group is not None:
        dist.all_reduce(added, dist.ReduceOp.SUM, share.group)
        if maxima:
            dist.all_reduce(largest, dist.ReduceOp.MAX, share.group)
    return dict(zip(names, torch.cat([added, largest]).tolist(), strict=True))
