"""Reading a version into tensors that are spread over several ranks: each rank copies its own parts.

The publisher's layout does not matter: its ranks have put whole tensors side by side in shared memory. A rank maps
them and touches only the pages of its parts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from forgelite.weights.manifest import check_tensors, describe
from forgelite.weights.pieces import copy_overlap, held_piece, local_part, whole

if TYPE_CHECKING:
    from forgelite.weights.manifest import Manifest
    from forgelite.weights.store import WeightStore


async def fetch_shards(store: WeightStore, version: int | Manifest, into: Mapping[str, torch.Tensor]) -> None:
    """Copy this rank's parts of `version` into its tensors. No collective: ranks need not wait for one another.

    Args:
        store: that finds the version.
        version: its number or its manifest.
        into: name -> plain or distributed tensor, with exactly the version's names, whole shapes and dtypes.

    Raises:
        VersionUnavailable: never committed, or dropped; `into` is untouched.
        WeightMismatch: names, shapes or dtypes differ, or the fingerprint of the whole version; `into` is untouched.
    """
    async with store.lease(version) as views:
        check_tensors(describe(views), into, owner=f"version {getattr(version, 'version', version)}")
        await asyncio.to_thread(copy_parts, views, into)


@torch.no_grad()
def copy_parts(views: Mapping[str, torch.Tensor], into: Mapping[str, torch.Tensor]) -> None:
    """Copy from whole tensors what each tensor of `into` holds locally.

    Args:
        views: name -> whole tensor.
        into: name -> plain or distributed tensor of the same whole shape.
    """
    for info in describe(views):
        part, local = held_piece(info.name, into[info.name]), local_part(into[info.name])
        if part is not None:
            with torch.inference_mode():  # a tensor that was made in inference mode is written in no other
                copy_overlap(whole(info), views[info.name], part, local)
