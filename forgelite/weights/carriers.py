"""Which carrier takes the weights from the trainer to the policy: chosen once, from where the stations run.

shm          one host: shared memory, read in place
rdma         several hosts: from shared memory to shared memory, by Monarch's RDMA buffers
torchstore   any host: packed into one key of a volume (by choice)
filesystem   any host that sees the folder: safetensors (by choice)
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from forgelite.errors import ConfigError
from forgelite.weights.manifest import Carrier


def choose_carrier(asked: Literal["auto"] | Carrier, hosts: Collection[str]) -> Carrier:
    """The carrier of a run.

    Args:
        asked: `weights.carrier`.
        hosts: the names of those on which the trainer and the policies run.

    Raises:
        ConfigError: what was asked for cannot reach all of them.
    """
    several = len(set(hosts)) > 1
    if asked == "auto":
        return "rdma" if several else "shm"
    if asked == "shm" and several:
        raise ConfigError(
            f"weights.carrier=shm, but trainer and policy run on {sorted(set(hosts))}, which share no memory: set "
            f"weights.carrier=rdma or auto"
        )
    return asked
