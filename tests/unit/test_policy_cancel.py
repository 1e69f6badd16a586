"""What the loop needs of a policy to cancel what is too old: the versions that it samples with."""

from __future__ import annotations

import pytest

from forgelite.policy.engine_loop import EngineLoop
from forgelite.policy.groups import LiveGroup, first_versions
from forgelite.types import GroupRequest, SamplingParams
from tests.unit.version_engine import VersionEngine
from tests.unit.version_engine import request as engine_request

pytestmark = pytest.mark.timeout(20)


def live(name: str, session: str | None, *members: list[int]) -> LiveGroup:
    """A running group; each member is given as the versions of its tokens."""
    sampling = SamplingParams(max_tokens=8)
    group = LiveGroup.of(
        GroupRequest(request_id=name, prompt_ids=(1,), sampling=sampling, n=len(members), session=session)
    )
    for member, versions in zip(group.members, members, strict=True):
        for version in versions:
            member.extend([7], [-0.1], version)
    return group


def test_a_running_group_is_as_old_as_its_oldest_token():
    assert first_versions([live("g1", None, [3, 4], [4])]) == {"g1": 3}


def test_a_group_that_waits_for_its_first_token_has_no_version_yet():
    assert first_versions([live("g1", None, [], []), live("g2", None, [], [5])]) == {"g2": 5}


def test_requests_of_one_session_are_one_group():
    assert first_versions([live("g1/0/1", "g1", [6]), live("g1/1/1", "g1", [5])]) == {"g1": 5}


def test_the_engine_tells_while_it_samples():
    engine = VersionEngine(gate=True)
    loop = EngineLoop(engine, seed=0)
    try:
        loop.submit([engine_request("g1", n=2, max_tokens=4)])
        engine.wait_inside_step()
        assert loop.stats().first_versions == {}
        engine.allow(1)
        engine.wait_inside_step()
        assert loop.stats().first_versions == {"g1": 0}
    finally:
        engine.open()
        loop.close()
