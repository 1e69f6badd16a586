"""What the policy actor holds of published weights, without an engine and without Monarch."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from forgelite.policy.actor import PolicyActor
from forgelite.policy.engine_protocol import UpdateReport

update_weights = PolicyActor.update_weights._method.__wrapped__  # what the endpoint calls


@dataclass
class Reader:
    """Versions that are leased."""

    leased: set[int] = field(default_factory=set)
    cannot_give_back: int | None = None

    @asynccontextmanager
    async def lease(self, version: int) -> AsyncIterator[Mapping[str, Any]]:
        self.leased.add(version)
        try:
            yield {}
        finally:
            self.leased.discard(version)
            if version == self.cannot_give_back:
                raise OSError("the segment is gone")

    def close(self) -> None:
        self.leased.clear()


class Engine:
    """Takes every version that it is given."""

    version = 0

    def holds(self, version: int) -> bool:
        return version == self.version

    def update(self, version: int, load: Callable[[], Mapping[str, Any]], **options: Any) -> UpdateReport:
        load()
        self.version = version
        return UpdateReport(version=version, queued_s=0.0, paused_s=0.0, recomputed=0)


def make_actor(reader: Reader, *, in_place: bool) -> PolicyActor:
    actor = PolicyActor()
    actor._loop, actor._reader, actor._in_place = Engine(), reader, in_place
    return actor


@pytest.mark.parametrize("in_place", [True, False])
async def test_a_version_is_leased_for_as_long_as_it_is_served_in_place_and_no_longer(in_place: bool):
    reader = Reader()
    actor = make_actor(reader, in_place=in_place)
    for version in (1, 2):
        await update_weights(actor, version, None)
        assert reader.leased == ({version} if in_place else set())


async def test_a_lease_that_cannot_be_given_back_does_not_cost_the_one_of_the_version_in_use():
    reader = Reader(cannot_give_back=1)
    actor = make_actor(reader, in_place=True)
    await update_weights(actor, 1, None)
    with pytest.raises(OSError, match="the segment is gone"):
        await update_weights(actor, 2, None)
    assert actor._loop.version == 2
    assert reader.leased == {2}
