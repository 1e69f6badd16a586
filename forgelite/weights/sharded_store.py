"""The store of a process that publishes together with others: `WeightStore` for shards."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forgelite.errors import WeightError
from forgelite.weights.announcing import Announcements
from forgelite.weights.arena_layout import transferred
from forgelite.weights.directory import Directory
from forgelite.weights.manifest import Manifest, TensorInfo
from forgelite.weights.sharding import Draw, ShardedPublisher


class ShardedStore:
    """One rank's end. Readers open a `WeightStore` or a `RemoteStore`, as after any other publisher."""

    def __init__(
        self, *, publisher: ShardedPublisher, directory: Directory | None, transfer_dtype: torch.dtype | None = None
    ) -> None:
        """
        Args:
            publisher: of this rank.
            directory: where versions are announced; None on all ranks but the first.
            transfer_dtype: as for `WeightStore`.
        """
        self._publisher = publisher
        self._announcements = Announcements(directory) if directory is not None else None
        self._transfer_dtype = transfer_dtype

    def commit(self, version: int, tensors: Sequence[TensorInfo], draw: Draw) -> Manifest:
        """Write this rank's shards; return when the version is whole. A collective, to be called in one thread.

        Args:
            version: completed optimizer steps; must rise from call to call.
            tensors: the whole tensors as the ranks hold them.
            draw: as for `ShardedPublisher.publish`, which says what is raised.
        """
        sent = [transferred(info, self._transfer_dtype) for info in tensors]
        return self._publisher.publish(version, sent, draw)

    async def announce(self, manifest: Manifest) -> None:
        """Tell the directory of a version, on the first rank."""
        if self._announcements is None:
            raise WeightError("only the first rank announces versions")
        await self._announcements.announce(manifest, self._publisher.versions())

    def close(self) -> None:
        """Remove the segment, on the rank that owns it. May be called twice."""
        self._publisher.close()
