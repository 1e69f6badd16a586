"""Whatever dies, hangs or teaches nothing: the run goes on or ends with its cause, within its deadline.

The rows of the table "What happens when" in docs/architecture.md, on the real loop and clients and a virtual clock.
The same with real processes: tests/faults/test_run_deaths.py.
"""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.virtual_clock import run_virtual
from forgelite.buffer.ledger import State
from forgelite.errors import DeadlineExceeded, ForgeliteError, StationDied, WeightError
from forgelite.observe.gates import within
from forgelite.scoring.reward_actor import ScoringReply
from forgelite.scoring.reward_client import RewardClient
from forgelite.types import Score
from tests.unit.fakes import FakeRun, make_run

DEADLINE_S = 60.0  # loop.batch_timeout_s of the fakes


def ends_with(run: FakeRun, error: type[Exception], match: str) -> float:
    """Run, expect `error`, and give the seconds that it took; nothing of the run is left behind."""

    async def seconds() -> float:
        with pytest.raises(error, match=match):
            await run.loop.run()
        for _ in range(5):
            await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return asyncio.get_running_loop().time()

    took = run_virtual(seconds())
    final = run.recorder.final
    assert final["ledger/in_flight"] == final["ledger/queued"] == 0
    assert final["ledger/issued"] == sum(final[f"ledger/{state}"] for state in State)
    return took


def after_steps(run: FakeRun, steps: int, station: object, method: str, behaviour) -> None:
    """Replace a method of a station by `behaviour` once `steps` steps are done."""
    calm = getattr(station, method)

    async def changed(*arguments):
        return await (calm if run.trainer.version < steps else behaviour)(*arguments)

    setattr(station, method, changed)


def raises(error: Exception):
    async def behaviour(*_):
        raise error

    return behaviour


async def hangs(*_):
    await asyncio.Event().wait()


@pytest.mark.parametrize("depth", [0, 1, 3, None])
@pytest.mark.parametrize("method", ["generate_group", "update_weights", "usage"])
def test_a_dead_policy_ends_the_run_at_once_with_its_cause(depth, method):
    run = make_run(depth=depth, steps=50, max_policy_age=3)
    after_steps(run, 2, run.policy, method, raises(StationDied("station policy died: Killed(sig=9)")))
    assert ends_with(run, StationDied, r"station policy died: Killed") < 1


@pytest.mark.parametrize("method", ["train_step", "publish"])
def test_a_dead_trainer_ends_the_run_at_once_with_its_cause(method):
    run = make_run(depth=2, steps=50, max_policy_age=3)
    after_steps(run, 2, run.trainer, method, raises(StationDied("station trainer died")))
    assert ends_with(run, StationDied, "station trainer died") < 1


def test_a_station_that_dies_while_nobody_talks_to_it_ends_the_run():
    async def dies():
        await asyncio.sleep(5)
        raise StationDied("station reference died")

    run = make_run(depth=1, steps=50)
    run.policy.generate_group = hangs

    async def main():
        run.loop._station_died = asyncio.ensure_future(dies())
        with pytest.raises(StationDied, match="reference"):
            await run.loop.run()
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(5)


class RewardProcess:
    """One reward process; those with a `behaviour` show it after a moment."""

    def __init__(self, behaviour) -> None:
        self.behaviour = behaviour

    async def score(self, samples):
        await asyncio.sleep(0.1)
        if self.behaviour is not None:
            return await self.behaviour()
        return ScoringReply(results=[Score(reward=1.0) for _ in samples], hung_threads=0)

    async def stop(self) -> None:
        pass


def reward_client(bad: int, behaviour) -> tuple[RewardClient, list[RewardProcess]]:
    """A client whose first `bad` processes misbehave, and the processes that it has started."""
    started = [RewardProcess(behaviour)]

    async def replace() -> RewardProcess:
        started.append(RewardProcess(behaviour if len(started) < bad else None))
        return started[-1]

    client = RewardClient(started[0], replace=replace, seconds_for=lambda samples, calls: 10.0, max_hung_threads=4)
    return client, started


@pytest.mark.parametrize("behaviour", [raises(StationDied("killed")), hangs], ids=["dead", "hung"])
def test_a_reward_process_that_dies_or_hangs_is_replaced_and_costs_its_samples_only(behaviour):
    client, started = reward_client(2, behaviour)
    run = make_run(depth=1, steps=5, score=client.score)

    async def seconds():
        await run.loop.run()
        return asyncio.get_running_loop().time()

    assert run_virtual(seconds()) < DEADLINE_S
    assert len(started) == 3
    assert run.loop.ledger.metrics()["ledger/failed/process"] > 0
    assert run.trainer.version == 5


@pytest.mark.parametrize("behaviour", [raises(StationDied("killed")), hangs], ids=["dead", "hung"])
def test_reward_processes_that_go_on_dying_or_hanging_end_the_run(behaviour):
    run = make_run(depth=1, steps=5, score=reward_client(99, behaviour)[0].score)
    assert ends_with(run, StationDied, "replaced 3 times in a row") < DEADLINE_S


def test_a_hung_scorer_without_a_deadline_of_its_own_ends_the_run_at_the_batch_gate_and_is_named():
    run = make_run(depth=1, steps=5, score=hangs)
    message = (
        r"waited 60 s for a training batch \(loop\.batch_timeout_s\): 0 of 3 groups are queued, 3 in flight, "
        r"0 rolling out and 3 scoring \(oldest: g0, scoring, started 60 s ago\), held by the rewards or the reference"
    )
    assert ends_with(run, DeadlineExceeded, message) == pytest.approx(DEADLINE_S)
    assert "waiting for a training batch (loop.batch_timeout_s) for 30 s: 0 of 3" in run.recorder.notes[0]


def test_a_hung_rollout_costs_its_members_at_its_own_deadline():
    run = make_run(depth=1, steps=5, loop={"batch_timeout_s": 2000.0})
    generate = run.policy.generate_group

    async def some_hang(request):
        return await (hangs if request.request_id in ("g1", "g4") else generate)(request)

    run.policy.generate_group = some_hang
    run_virtual(run.loop.run())
    lost = run.loop.ledger.metrics()
    assert lost.get("ledger/failed/timeout", 0) + lost.get("ledger/cancelled/run_ended", 0) == 4


def test_a_rollout_that_is_cancelled_from_inside_ends_the_run_and_is_named():
    """A task group takes a cancelled task for one that it has cancelled: the group would be in flight for ever."""
    run = make_run(depth=1, steps=50)
    after_steps(run, 2, run.policy, "generate_group", raises(asyncio.CancelledError()))
    ends_with(run, ForgeliteError, r"group g\d+ was cancelled from inside while it was rolling out")


def test_a_straggler_that_holds_the_line_is_told_and_named():
    run = make_run(depth=1, steps=5, loop={"selection": "fifo"})
    generate = run.policy.generate_group

    async def first_hangs(request):
        return await (hangs if request.request_id == "g0" else generate)(request)

    run.policy.generate_group = first_hangs
    ends_with(
        run, DeadlineExceeded, r"5 of 3 groups are queued, 1 in flight.*oldest: g0, rolling out, started 60 s ago"
    )


@pytest.mark.parametrize("replace", [True, False])
def test_a_run_whose_groups_are_all_filtered_ends_at_its_deadline_with_the_counts(replace):
    run = make_run(
        depth=1,
        steps=5,
        filter_zero_variance=True,
        reward=lambda sample, rng: Score(reward=1.0),
        loop={"replace_filtered": replace},
    )
    generate = run.policy.generate_group

    async def timed(request):
        await asyncio.sleep(1)
        return await generate(request)

    run.policy.generate_group = timed
    assert ends_with(run, DeadlineExceeded, "a training batch.*filtered/zero_variance") == pytest.approx(DEADLINE_S)
    assert "equal rewards" in run.recorder.notes[0]


@pytest.mark.parametrize("depth", [0, 2])
def test_a_failing_update_ends_the_run_and_the_version_does_not_move(depth):
    run = make_run(depth=depth, max_policy_age=2, steps=50)
    after_steps(run, 3, run.policy, "update_weights", raises(WeightError("version 3 does not fit: missing lm_head")))
    ends_with(run, WeightError, "missing lm_head")
    assert run.policy.version == 2


def test_a_hung_update_ends_the_run_at_the_deadline_of_its_call_and_is_told_before():
    run = make_run(depth=1, steps=50)

    async def update(version):
        await within(45, hangs(), f"the policy to take version {version}")

    run.policy.update_weights = update
    assert ends_with(run, DeadlineExceeded, "the policy to take version 1") == pytest.approx(45)
    assert any(
        n.startswith("waiting for the policy to take version 1 (weights.timeout_s) for 30") for n in run.recorder.notes
    )


def test_a_hung_trainer_ends_the_run_at_the_deadline_of_its_call_and_is_told_before():
    run = make_run(depth=1, steps=50)

    async def train_step(batch):
        await within(45, hangs(), "train_step (mesh.call_timeout_s)")

    run.trainer.train_step = train_step
    ends_with(run, DeadlineExceeded, "train_step")
    assert run.recorder.notes[0] == "waiting for training step 1 (mesh.call_timeout_s) for 30 s: held by the trainer"


def test_rollouts_that_do_not_end_hold_a_barrier_until_its_deadline():
    run = make_run(depth=1, max_policy_age=1, steps=5, barrier=True, loop={"max_groups_in_flight": 4})
    generate = run.policy.generate_group

    async def one_hangs(request):
        return await (hangs if request.request_id == "g3" else generate)(request)

    run.policy.generate_group = one_hangs
    ends_with(
        run,
        DeadlineExceeded,
        r"held by the barrier: an update waits for running rollouts.*serves 0.*trainer at version 1",
    )
    assert any("running rollouts to end before version 1 (policy.update.mode=barrier" in n for n in run.recorder.notes)


@pytest.mark.parametrize("depth", [0, 1, 4, None])
def test_the_last_step_ends_the_run_whatever_is_in_flight(depth):
    """Slow groups are in flight, an evaluation and a checkpoint are due: nothing of it is waited for in vain."""

    async def evaluate():
        await asyncio.sleep(1)
        return {"eval/reward": 0.5}

    saved = []

    async def save(state):
        saved.append(state["version"])

    run = make_run(
        depth=depth,
        max_policy_age=4,
        steps=3,
        evaluate=evaluate,
        save=save,
        save_every=2,
        loop={"max_groups_in_flight": 9} if depth is None else {"oversample": 2.0},
    )
    generate = run.policy.generate_group

    async def slow(request):
        await asyncio.sleep(1 if int(request.request_id[1:]) % 3 else 40)
        return await generate(request)

    run.policy.generate_group = slow

    async def seconds():
        await run.loop.run()
        for _ in range(5):
            await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtual(seconds())
    assert run.trainer.version == run.policy.version == 3
    assert saved == [2, 3]
    assert run.recorder.lines[-1][1]["eval/reward"] == 0.5
    assert run.recorder.final["ledger/in_flight"] == run.recorder.final["ledger/queued"] == 0
