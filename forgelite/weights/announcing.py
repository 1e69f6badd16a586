"""What the directory has been told by one publisher, and what it must forget."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from forgelite.errors import WeightError
from forgelite.weights.directory import Directory
from forgelite.weights.manifest import Manifest


class Announcements:
    """The versions that one publisher has announced and not yet taken back."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._known: list[int] = []  # oldest first
        self._turn = asyncio.Lock()

    async def announce(self, manifest: Manifest, whole: Collection[int]) -> list[int]:
        """Tell the directory of `manifest`; make it forget what is gone.

        Args:
            manifest: of a committed version, newer than every announced one.
            whole: the versions that can still be read.

        Returns:
            The versions that the directory has forgotten.

        Raises:
            WeightError: the version does not rise, or the directory fails.
        """
        async with self._turn:
            if self._known and manifest.version <= self._known[-1]:
                raise WeightError(f"cannot announce version {manifest.version} after version {self._known[-1]}")
            await self._directory.put_manifest(manifest.version, manifest)
            self._known.append(manifest.version)
            gone = [version for version in self._known if version not in whole]
            for version in gone:
                await self._directory.drop(version)
                self._known.remove(version)
            return gone
