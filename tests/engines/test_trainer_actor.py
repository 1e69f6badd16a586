"""The actors around trainer and reference, in a real Monarch process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import monarch.actor
import pytest
import torch
from monarch.actor import default_bootstrap_cmd, this_host

from forgelite.config import TrainerConfig
from forgelite.config.loss import ClipLossConfig
from forgelite.errors import TrainingDiverged
from forgelite.scoring.reference_actor import ReferenceActor
from forgelite.trainer.actor import TrainerActor, TrainerSetup
from forgelite.weights.arena_reader import ArenaReader
from forgelite.wire import decode_tensors, encode_batch
from tests.engines.tiny import model_config, one_each, save_llama, sequences
from tests.engines.trainer_store import open_store

pytestmark = pytest.mark.engine

BATCH = one_each(sequences())
SECONDS = 120


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a named pipe makes a publication wait before its copy."""
    return tmp_path_factory.mktemp("gate") / "gate"


@pytest.fixture(scope="module")
def actors(tmp_path_factory: pytest.TempPathFactory, gate: Path) -> Iterator[tuple[Any, Any]]:
    """A trainer and a reference, set up, in one process."""
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    processes = this_host().spawn_procs(
        per_host={"procs": 1}, bootstrap_command=lambda _: default_bootstrap_cmd().with_env(environment)
    )
    trainer = processes.spawn("trainer", TrainerActor)
    reference = processes.spawn("reference", ReferenceActor)
    model = model_config(save_llama(tmp_path_factory.mktemp("llama")))
    setup = TrainerSetup(
        model=model,
        trainer=TrainerConfig.model_validate({"optimizer": {"lr": 1e-2}, "training": {"seq_len": 64}}),
        loss=ClipLossConfig(),
        steps=10,
        seed=0,
        temperature=1.0,
        open_store=partial(open_store, f"test-{os.getpid()}", gate),
    )
    assert trainer.setup.call_one(setup).get(timeout=SECONDS) == 0
    reference.setup.call_one(model, 64, 0, 1.0, 8).get(timeout=SECONDS)
    yield trainer, reference
    trainer.close.call_one().get(timeout=SECONDS)
    processes.stop().get(timeout=SECONDS)


def _answer(call: Any) -> Any:
    return call.get(timeout=SECONDS)


def test_a_published_version_is_that_of_the_trainer_and_holds_its_weights(
    actors: tuple[Any, Any], tmp_path: Path
) -> None:
    trainer, _ = actors
    version = _answer(trainer.train_step.call_one(encode_batch(BATCH))).version
    manifest = _answer(trainer.publish.call_one())
    assert manifest.version == version == _answer(trainer.version.call_one())
    _answer(trainer.save_hf.call_one(str(tmp_path / "hf")))
    _assert_holds(manifest, tmp_path / "hf")


def test_calls_are_answered_while_weights_are_copied_and_a_step_does_not_change_what_is_copied(
    actors: tuple[Any, Any], gate: Path, tmp_path: Path
) -> None:
    trainer, _ = actors
    version = _answer(trainer.train_step.call_one(encode_batch(BATCH))).version
    _answer(trainer.save_hf.call_one(str(tmp_path / "hf")))
    os.mkfifo(gate)
    publishing = trainer.publish.call_one()
    try:
        _answer(trainer.evaluate.call_one(encode_batch(BATCH)))  # is answered though nothing is copied yet
        stepping = trainer.train_step.call_one(encode_batch(BATCH))
        with pytest.raises(TimeoutError):  # a step alone takes far less
            stepping.get(timeout=1.0)
    finally:
        gate.write_bytes(b"")
        gate.unlink()

    manifest = _answer(publishing)
    assert manifest.version == version
    _assert_holds(manifest, tmp_path / "hf")
    assert _answer(stepping).version == version + 1


def _assert_holds(manifest: Any, folder: Path) -> None:
    """The version in shared memory has the tensors of a Hugging Face folder."""
    from forgelite.model.device import prepare_torchtitan

    prepare_torchtitan()
    from forgelite.model.hf import read_hf

    saved = read_hf(folder)
    reader = ArenaReader(Path(manifest.segment))
    with reader.lease(manifest.version) as (_, tensors):
        assert tensors.keys() == saved.keys()
        assert all(torch.equal(tensors[name], tensor) for name, tensor in saved.items())
    reader.close()


def test_a_diverged_step_keeps_its_type_and_the_actor_goes_on(actors: tuple[Any, Any]) -> None:
    trainer, _ = actors
    version = _answer(trainer.version.call_one())
    bad = one_each(sequences())
    bad.advantages[bad.loss_mask] = float("nan")
    with pytest.raises(monarch.actor.ActorError) as caught:
        _answer(trainer.train_step.call_one(encode_batch(bad)))
    assert isinstance(caught.value.exception, TrainingDiverged)
    assert _answer(trainer.train_step.call_one(encode_batch(BATCH))).version == version + 1


def test_a_loaded_state_brings_its_version_back(actors: tuple[Any, Any], tmp_path: Path) -> None:
    trainer, _ = actors
    version = _answer(trainer.version.call_one())
    loss = _answer(trainer.evaluate.call_one(encode_batch(BATCH)))
    _answer(trainer.save.call_one(str(tmp_path / "state")))
    _answer(trainer.train_step.call_one(encode_batch(BATCH)))
    assert _answer(trainer.evaluate.call_one(encode_batch(BATCH))) != loss
    assert _answer(trainer.load.call_one(str(tmp_path / "state"))) == version
    assert _answer(trainer.evaluate.call_one(encode_batch(BATCH))) == loss


def test_steps_sent_together_are_done_one_after_the_other(actors: tuple[Any, Any]) -> None:
    trainer, _ = actors
    version = _answer(trainer.version.call_one())
    calls = [trainer.train_step.call_one(encode_batch(BATCH)) for _ in range(3)]
    assert [_answer(call).version for call in calls] == [version + 1, version + 2, version + 3]


def test_the_reference_stays_the_starting_model(actors: tuple[Any, Any]) -> None:
    trainer, reference = actors
    (before,) = decode_tensors(_answer(reference.logprobs.call_one(encode_batch(BATCH))))
    _answer(trainer.train_step.call_one(encode_batch(BATCH)))
    (after,) = decode_tensors(_answer(reference.logprobs.call_one(encode_batch(BATCH))))
    assert torch.equal(before, after)
    assert bool((before != 0).eq(BATCH.loss_mask).all())
