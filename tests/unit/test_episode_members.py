"""Members rolled out one by one, and rollouts that are cancelled before they have begun."""

from __future__ import annotations

import asyncio
import gc
import warnings

from forgelite.types import Trajectory
from tests.unit.test_episode import PROMPT, Countdown, Script, make_rollout


async def test_a_member_alone_is_a_request_of_its_own_with_its_own_seed():
    script = Script()
    rollout = make_rollout(script)
    members = [await rollout.run_member("g0", PROMPT, i) for i in range(3)]
    assert [m.trajectory_id for m in members] == ["g0/0", "g0/1", "g0/2"]
    assert [r.request_id for r in script.requests] == ["g0/0", "g0/1", "g0/2"]
    assert {r.session for r in script.requests} == {"g0"}
    assert len({r.sampling.seed for r in script.requests}) == 3


async def test_a_member_alone_goes_through_all_its_turns():
    script = Script()
    together = await make_rollout(Script(), Countdown).run("g0", PROMPT, 2)
    alone = await make_rollout(script, Countdown).run_member("g0", PROMPT, 1)
    assert isinstance(alone, Trajectory)
    assert (alone.token_ids, alone.loss_mask) == (together[1].token_ids, together[1].loss_mask)
    assert [r.request_id for r in script.requests] == ["g0/1", "g0/1/1", "g0/1/2"]


async def test_a_member_alone_that_cannot_be_sampled_is_a_failure():
    failure = await make_rollout(Script(), max_tokens=2).run_member("g0", PROMPT, 0)
    assert failure.reason == "rejected"


async def test_a_rollout_that_is_cancelled_at_any_moment_leaves_no_coroutine_unawaited():
    """Also between the creation of the members' tasks and their first step."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for moment in range(12):
            rollout = asyncio.ensure_future(make_rollout(Script()).run("g0", PROMPT, 4))
            for _ in range(moment):
                await asyncio.sleep(0)
            rollout.cancel()
            await asyncio.gather(rollout, return_exceptions=True)
        gc.collect()
    assert [str(w.message) for w in caught] == []
