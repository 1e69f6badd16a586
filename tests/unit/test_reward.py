"""Rewards: every call ends, and a failure is never a number."""

from __future__ import annotations

import asyncio
import threading

import pytest

from forgelite.config import RewardConfig
from forgelite.errors import ConfigError, StationDied
from forgelite.scoring.reward import RewardSample, Scorer, WeightedReward, load_reward
from forgelite.scoring.reward_actor import ScoringReply
from forgelite.scoring.reward_client import MAX_REPLACEMENTS_IN_A_ROW, RewardClient, seconds_to_score
from forgelite.scoring.rewards import environment_reward, exact_match, finished, last_number_matches
from forgelite.types import Failure, Score


def sample(number: int = 0, completion: str = "", **row) -> RewardSample:
    return RewardSample(sample_id=f"g0/{number}", prompt="p", completion=completion, finish_reason="stop", row=row)


def scorer(*functions, timeout_s: float = 5.0, max_threads: int = 2) -> Scorer:
    rewards = [WeightedReward(name=f.__name__, function=f, weight=w, timeout_s=timeout_s) for f, w in functions]
    return Scorer(rewards, max_concurrency=8, max_threads=max_threads)


async def test_sync_and_async_rewards_are_summed_by_their_weights():
    def length(s):
        return len(s.completion)

    async def one(s):
        return 1

    (score,) = await scorer((length, 0.5), (one, 2.0)).score([sample(completion="abcd")])
    assert score == Score(reward=4.0, parts={"length": 4.0, "one": 1.0})


async def test_results_keep_the_order_of_the_samples():
    def number(s):
        return int(s.completion)

    scores = await scorer((number, 1.0), max_threads=3).score([sample(i, str(i)) for i in range(20)])
    assert [s.reward for s in scores] == list(range(20))


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_a_reward_that_raises_fails_its_own_sample(asynchronous):
    def fussy(s):
        if s.completion == "bad":
            raise ValueError("cannot parse")
        return 1.0

    async def fussy_async(s):
        return fussy(s)

    good, bad = await scorer((fussy_async if asynchronous else fussy, 1.0)).score([sample(0, "good"), sample(1, "bad")])
    assert good.reward == 1.0
    assert bad.reason == "raised"
    assert "g0/1" in bad.message
    assert "ValueError: cannot parse" in bad.message


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
async def test_a_reward_that_is_not_finite_is_a_failure(value):
    def bad(s):
        return value

    (failure,) = await scorer((bad, 1.0)).score([sample()])
    assert failure.reason == "not_finite"


async def test_a_reward_that_is_not_a_number_is_a_failure():
    def bad(s):
        return None

    (failure,) = await scorer((bad, 1.0)).score([sample()])
    assert failure.reason == "not_a_number"
    assert "None" in failure.message


async def test_an_async_reward_that_hangs_fails_its_own_sample():
    async def hangs(s):
        if s.completion == "hang":
            await asyncio.Event().wait()
        return 1.0

    first, second = await scorer((hangs, 1.0), timeout_s=0.5).score([sample(0, "hang"), sample(1)])
    assert (first.reason, second.reward) == ("timeout", 1.0)


async def test_an_async_reward_that_cancels_itself_fails_its_own_sample():
    async def cancels(s):
        if s.completion == "bad":
            raise asyncio.CancelledError
        return 1.0

    failure, score = await scorer((cancels, 1.0)).score([sample(completion="bad"), sample(completion="good")])
    assert (failure.reason, score.reward) == ("raised", 1.0)
    assert "the reward cancelled itself" in failure.message


async def test_a_sync_reward_that_hangs_fails_its_own_sample_and_the_rest_of_its_thread_goes_on():
    release = threading.Event()

    def hangs(s):
        if s.completion == "hang":
            release.wait()
        return 1.0

    scoring = scorer((hangs, 1.0), timeout_s=0.5, max_threads=1)
    results = await scoring.score([sample(0), sample(1, "hang"), sample(2), sample(3)])
    assert [isinstance(r, Failure) for r in results] == [False, True, False, False]
    assert results[1].reason == "timeout"
    assert scoring.hung_threads == 1
    release.set()


async def test_hung_threads_are_counted_until_they_end():
    release, left = threading.Event(), threading.Event()

    def hangs(s):
        release.wait()
        left.set()

    scoring = scorer((hangs, 1.0), timeout_s=0.05)
    await scoring.score([sample()])
    thread = scoring._left_behind[0]
    assert scoring.hung_threads == 1
    release.set()
    thread._thread.join(5)
    assert left.is_set()
    assert scoring.hung_threads == 0


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no.such:thing", "cannot import no.such"),
        ("math:nothing", "math has no nothing"),
        ("math", "'math' is not of the form"),
        ("math:pi", "math:pi is a float, not a function"),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_named(path, message):
    with pytest.raises(ConfigError, match=rf"reward\.functions: .*{message}"):
        load_reward(path, name=None, weight=1.0, timeout_s=1.0)


class Process:
    """A reward process that plays a script: each entry is a reply or an exception."""

    def __init__(self, *script):
        self.script, self.calls, self.stopped = list(script), [], False

    async def score(self, samples):
        self.calls.append(len(samples))
        action = self.script.pop(0) if self.script else 0
        if isinstance(action, Exception):
            raise action
        return ScoringReply(results=[Score(reward=1.0)] * len(samples), hung_threads=action)

    async def stop(self):
        self.stopped = True


def client(*processes: Process) -> RewardClient:
    rest = iter(processes[1:])

    async def replace():
        return next(rest)

    return RewardClient(processes[0], replace=replace, seconds_for=lambda samples, calls: 5, max_hung_threads=3)


def test_the_deadline_of_a_process_grows_with_all_that_it_has_to_do():
    functions = [{"path": "m:a", "timeout_s": 10}, {"path": "m:b", "timeout_s": 2}]
    reward = RewardConfig(functions=functions, max_threads=4, max_concurrency=64)
    one_call, many_calls = seconds_to_score(reward, 8, 1), seconds_to_score(reward, 64, 8)
    assert one_call >= 2 * (10 + 2)
    assert many_calls >= 16 * (10 + 2)


async def test_a_slow_process_is_given_time_for_the_samples_of_every_open_call():
    asked = []

    def seconds_for(samples, calls):
        asked.append((samples, calls))
        return 5

    release = asyncio.Event()

    class Slow(Process):
        async def score(self, samples):
            await release.wait()
            return await super().score(samples)

    rewards = RewardClient(Slow(), replace=None, seconds_for=seconds_for, max_hung_threads=3)
    first = asyncio.ensure_future(rewards.score([sample(0), sample(1)]))
    await asyncio.sleep(0.01)
    second = asyncio.ensure_future(rewards.score([sample(2)]))
    await asyncio.sleep(0.01)
    release.set()
    await asyncio.gather(first, second)
    assert asked == [(2, 1), (3, 2)]


async def test_samples_scored_at_the_same_moment_travel_in_one_call():
    process = Process()
    rewards = client(process)
    results = await asyncio.gather(*(rewards.score([sample(i), sample(i)]) for i in range(5)))
    assert process.calls == [10]
    assert [len(r) for r in results] == [2] * 5


async def test_a_reward_process_that_dies_is_replaced_and_its_samples_are_failures():
    first, second = Process(StationDied("station reward died: Killed(sig=11)")), Process()
    rewards = client(first, second)
    (failure,) = await rewards.score([sample()])
    assert failure.reason == "process"
    assert "sig=11" in failure.message
    (score,) = await rewards.score([sample()])
    assert score.reward == 1.0
    assert first.stopped


async def test_a_process_in_which_too_many_threads_hang_is_replaced_and_its_results_are_kept():
    first, second = Process(3), Process()
    rewards = client(first, second)
    assert (await rewards.score([sample()]))[0].reward == 1.0
    assert first.stopped
    await rewards.score([sample()])
    assert second.calls == [1]


async def test_processes_that_keep_dying_end_the_run():
    rewards = client(*(Process(StationDied("died")) for _ in range(MAX_REPLACEMENTS_IN_A_ROW + 1)))
    for _ in range(MAX_REPLACEMENTS_IN_A_ROW):
        await rewards.score([sample()])
    with pytest.raises(StationDied, match="in a row"):
        await rewards.score([sample()])


def test_ready_made_rewards():
    assert exact_match(sample(completion=" 7 ", answer=7)) == 1.0
    assert last_number_matches(sample(completion="3 + 4 = 1,007.0", answer="1007")) == 1.0
    assert last_number_matches(sample(completion="seven", answer="7")) == 0.0
    assert finished(sample()) == 1.0
    with pytest.raises(ValueError, match="no reward"):
        environment_reward(sample())
