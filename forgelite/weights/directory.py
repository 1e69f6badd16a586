"""Where the manifests of published versions are found: the protocol, and its form on torchstore.

torchstore overwrites a key without a commit point, so a version gets a key of its own, and `latest` moves to
it only when that key is there. The weights themselves stay in the shared-memory segment that the manifest
names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from forgelite.errors import VersionUnavailable
from forgelite.weights.manifest import Manifest
from forgelite.weights.torchstore_client import TorchstoreClient, start_store, stop_store

if TYPE_CHECKING:
    from monarch.actor import ProcMesh

_LATEST = "latest"


class Directory(Protocol):
    """What a WeightStore needs to know about versions that other processes published."""

    async def put_manifest(self, version: int, manifest: Manifest) -> None:
        """Make `version` known, then make it the latest."""

    async def get(self, version: int) -> Manifest:
        """The manifest of `version`; raises VersionUnavailable when it is not known."""

    async def latest(self) -> Manifest:
        """The manifest that was put last; raises VersionUnavailable when there is none."""

    async def drop(self, version: int) -> None:
        """Forget `version`; nothing happens when it is not known. It must not be the latest."""


class TorchstoreDirectory:
    """A directory in the torchstore that `start_directory` has started, for any process of the run."""

    def __init__(self, *, name: str, deadline_s: float = 30.0) -> None:
        """
        Args:
            name: of the store, as given to `start_directory`.
            deadline_s: for one operation, in seconds.
        """
        self._store = TorchstoreClient(name=name, deadline_s=deadline_s, purpose="weight directory")

    async def attach(self) -> None:
        """Find the store, so that the first publish or fetch need not.

        Raises:
            WeightError: no store of this name was started.
        """
        await self._store.attach()

    async def put_manifest(self, version: int, manifest: Manifest) -> None:
        """Store the manifest under its own key, then move `latest`."""
        if version != manifest.version:
            raise ValueError(f"the manifest of version {manifest.version} was put as version {version}")
        await self._store.put(_key(version), manifest)
        await self._store.put(_LATEST, manifest)

    async def get(self, version: int) -> Manifest:
        """The manifest of `version`.

        Raises:
            VersionUnavailable: it was never put, or is dropped.
            WeightError: the store cannot be reached.
        """
        return await self._get(_key(version), f"version {version} was never announced, or has been dropped")

    async def latest(self) -> Manifest:
        """The manifest that was put last.

        Raises:
            VersionUnavailable: there is none yet.
            WeightError: the store cannot be reached.
        """
        return await self._get(_LATEST, "no version has been announced yet")

    async def drop(self, version: int) -> None:
        """Forget `version`; nothing happens when it is not known."""
        await self._store.delete(_key(version))

    async def _get(self, key: str, absent: str) -> Manifest:
        manifest = await self._store.get(key)
        if manifest is None:
            raise VersionUnavailable(absent)
        return manifest


async def start_directory(procs: ProcMesh, *, name: str) -> TorchstoreDirectory:
    """Start the store in an existing process, and return a directory on it.

    Called once, in the root. Other processes make `TorchstoreDirectory(name=name)` themselves.

    Args:
        procs: a process mesh of one process, which holds the manifests (a few kilobytes each). The directory
            dies with it, so take one that outlives the stations: the root's own, `monarch.actor.this_proc()`.
        name: of the store; stores of different names do not see one another.

    Raises:
        ValueError: `procs` has more than one process.
    """
    await start_store(procs, name=name)
    return TorchstoreDirectory(name=name)


async def stop_directory(name: str) -> None:
    """Empty the store of this name; operations on it fail from now on. Called in the root."""
    await stop_store(name)


def _key(version: int) -> str:
    return f"version.{version}"
