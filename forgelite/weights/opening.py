"""How a station opens its end of the store: a module function, so that it can be sent to the station's
process."""

from __future__ import annotations

from forgelite.weights.directory import TorchstoreDirectory
from forgelite.weights.store import WeightStore


def open_store(run_id: str, *, retain: int, fingerprint: bool, timeout_s: float) -> WeightStore:
    """The store of a run, over shared memory, with its directory in torchstore.

    Args:
        run_id: of the run; also the name of the torchstore that `start_directory` started.
        retain: `weights.retain`.
        fingerprint: `weights.fingerprint`.
        timeout_s: `weights.timeout_s`.
    """
    return WeightStore(
        directory=TorchstoreDirectory(name=run_id, deadline_s=timeout_s),
        run_id=run_id,
        retain=retain,
        timeout_s=timeout_s,
        fingerprint=fingerprint,
    )
