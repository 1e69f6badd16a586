"""Versions as folders: for readers that come and go, for debugging, and for handing weights to other tools.

    <folder>/version-00000008/model.safetensors   every tensor once; tied names stand in the manifest
    <folder>/version-00000008/manifest.json
    <folder>/latest                               the number of the newest announced version
    <folder>/.publisher                           locked by the one process that publishes here

A version is written beside its place and renamed, so it is there as a whole or not at all; `latest` is replaced by a
rename too. No process need be running to read one. Nothing is synced to the disk: after a power failure a version may
be cut short, which its fingerprint shows.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from forgelite.errors import VersionUnavailable, WeightError
from forgelite.weights import locks
from forgelite.weights.manifest import Manifest, TensorInfo, describe, memory_of

logger = logging.getLogger(__name__)

_WEIGHTS = "model.safetensors"
_MANIFEST = "manifest.json"
_LATEST = "latest"
_OWNER = ".publisher"
_PARTIAL = ".partial"
_GONE = ".gone"


class WeightFolder:
    """A folder of versions: both a carrier (`WholeCarrier`) and its own directory (`Directory`).

    Any number of processes may read; one at a time may publish.
    """

    def __init__(self, folder: Path) -> None:
        """
        Args:
            folder: where the versions lie; made by the first publication. Every reader must see it.
        """
        self._folder = folder.absolute()
        self._owner: int | None = None  # descriptor of the lock file, once this process publishes

    async def put(self, version: int, tensors: Mapping[str, torch.Tensor], fingerprint: str | None) -> Manifest:
        """Write a version.

        A version of the same or a higher number that an earlier publisher has left here is removed: it belongs to
        another course of training.

        Raises:
            WeightError: another process publishes here, or the disk is full or refuses.
        """
        try:
            return await asyncio.to_thread(self._put, version, tensors, fingerprint)
        except (OSError, SafetensorError) as error:
            raise WeightError(f"version {version} could not be written to {self._folder}: {error}") from error

    async def load(self, manifest: Manifest) -> Mapping[str, torch.Tensor]:
        """name -> tensor that maps the file; it stays whole when the version is dropped meanwhile.

        Raises:
            VersionUnavailable: the version is gone.
            WeightError: its file cannot be read.
        """
        return await asyncio.to_thread(_read, Path(manifest.segment), manifest.version)

    async def drop(self, version: int) -> None:
        """Remove a version; nothing happens when it is not there."""
        await asyncio.to_thread(_remove, self._place(version))

    async def put_manifest(self, version: int, manifest: Manifest) -> None:
        """Make `version`, which lies here already, the latest."""
        if not self._place(version).is_dir():
            raise WeightError(f"version {version} is not in {self._folder}: only what lies there can be announced")
        await asyncio.to_thread(_replace, self._folder / _LATEST, f"{version}\n")

    async def latest(self) -> Manifest:
        """The manifest of the newest announced version.

        Raises:
            VersionUnavailable: nothing was announced here yet.
        """
        try:
            version = int((self._folder / _LATEST).read_text())
        except FileNotFoundError:
            raise VersionUnavailable(f"no version has been announced in {self._folder} yet") from None
        return await self.get(version)

    async def get(self, version: int) -> Manifest:
        """The manifest of `version`.

        Raises:
            VersionUnavailable: it was never published here, or is dropped.
        """
        try:
            return _decode(json.loads((self._place(version) / _MANIFEST).read_text()), self._place(version))
        except FileNotFoundError:
            raise VersionUnavailable(
                f"version {version} is not in {self._folder}, which holds {self.versions()}"
            ) from None

    def versions(self) -> list[int]:
        """The versions that lie here, oldest first."""
        names = (re.fullmatch(r"version-(\d+)", path.name) for path in self._folder.glob("version-*"))
        return sorted(int(name.group(1)) for name in names if name)

    def close(self) -> None:
        """Let another process publish here. The versions stay. May be called twice."""
        if self._owner is not None:
            os.close(self._owner)
            self._owner = None

    def _put(self, version: int, tensors: Mapping[str, torch.Tensor], fingerprint: str | None) -> Manifest:
        self._become_publisher(version)
        place = self._place(version)
        work = self._folder / f".{place.name}{_PARTIAL}"
        work.mkdir()
        try:
            stored, same = _without_ties(tensors)
            save_file(stored, work / _WEIGHTS, metadata={"format": "pt"})
            manifest = Manifest(
                version=version,
                carrier="filesystem",
                segment=str(place),
                tensors=describe(tensors),
                nbytes=sum(tensor.nbytes for tensor in stored.values()),
                fingerprint=fingerprint,
            )
            (work / _MANIFEST).write_text(json.dumps(asdict(manifest) | {"tied": same, "pieces": None}))
            work.rename(place)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
        return manifest

    def _become_publisher(self, first: int) -> None:
        if self._owner is not None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._folder / _OWNER, os.O_RDWR | os.O_CREAT, 0o644)
        if not locks.try_lock(descriptor, 0, exclusive=True):
            owner = locks.holders(descriptor, 0)
            os.close(descriptor)
            raise WeightError(f"process {owner} publishes in {self._folder}: give every run a folder of its own")
        self._owner = descriptor
        for left in (*self._folder.glob(f".*{_PARTIAL}"), *self._folder.glob(f".*{_GONE}")):
            shutil.rmtree(left)  # its writer is dead: this process holds the lock
        for version in self.versions():
            if version >= first:
                logger.warning("removed version %d, which an earlier publisher left in %s", version, self._folder)
                _remove(self._place(version))

    def _place(self, version: int) -> Path:
        return self._folder / f"version-{version:08d}"


def _without_ties(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors with each memory once, plain and contiguous on the CPU; and tied name -> the name that is stored."""
    names: dict[tuple[object, ...], str] = {}
    same = {}
    for name, tensor in tensors.items():
        if (first := names.setdefault(memory_of(tensor), name)) != name:
            same[name] = first
    stored = {name: _plain(tensor) for name, tensor in tensors.items() if name not in same}
    return stored, same


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # safetensors refuses two tensors of one storage
    return plain if plain.nbytes == plain.untyped_storage().nbytes() else plain.clone()


def _read(place: Path, version: int) -> dict[str, torch.Tensor]:
    try:
        described = json.loads((place / _MANIFEST).read_text())
        with safe_open(place / _WEIGHTS, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except FileNotFoundError:
        raise VersionUnavailable(f"version {version} is gone: {place} was removed") from None
    except SafetensorError as error:
        raise WeightError(f"version {version}: {place / _WEIGHTS} cannot be read: {error}") from error
    tensors |= {name: tensors[first] for name, first in described["tied"].items()}
    return {info["name"]: tensors[info["name"]] for info in described["tensors"]}


def _decode(described: dict[str, Any], place: Path) -> Manifest:
    del described["tied"], described["pieces"]
    described["tensors"] = tuple(
        TensorInfo(name=info["name"], shape=tuple(info["shape"]), dtype=info["dtype"]) for info in described["tensors"]
    )
    return Manifest(**described | {"segment": str(place)})  # the folder may have been moved


def _replace(path: Path, text: str) -> None:
    new = path.with_name(f".{path.name}{_PARTIAL}.new")
    new.write_text(text)
    new.rename(path)


def _remove(place: Path) -> None:
    # Renamed first: a reader sees the whole version or none.
    gone = place.with_name(f".{place.name}{_GONE}")
    try:
        place.rename(gone)
    except FileNotFoundError:
        return
    shutil.rmtree(gone)
