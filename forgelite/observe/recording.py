"""The record of a run: every batch as it was trained, with all that its loss needs, to be trained from again.

<run.dir>/record/header.json               whose tokens they are, and how they were sampled
                 step-000001.safetensors   the groups that step 1 trained; for a person, rollouts.jsonl says more

A step is one file, written under another name and renamed, so a run that dies leaves whole steps. The tokens lie in
flat arrays, trajectory after trajectory, and everything else about them is JSON:

    token_ids           [N] int32
    loss_mask           [N] bool       after tokens that were too old had left it
    logprobs            [N] float32    behaviour
    reference_logprobs  [N] float32    only where every trajectory of the step has them
    batch               [B] uint8      JSON: groups, prompts, spans, scores, advantages. An array, because texts can be
                                       longer than the 100 MB that the file's own header may have
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from forgelite.errors import ConfigError, ForgeliteError
from forgelite.observe.metrics import Rate
from forgelite.observe.report import write_json
from forgelite.types import Group, Prompt, Score, Trajectory, VersionSpan

FOLDER = "record"
_FORMAT = 1
_STEP = re.compile(r"step-(\d{6,})\.safetensors")
_ARRAYS = {"token_ids": np.int32, "loss_mask": np.bool_, "logprobs": np.float32, "reference_logprobs": np.float32}
_PLAIN = ("trajectory_id", "group_id", "finish_reason", "completion_text", "environment_reward", "advantage")


@dataclass(kw_only=True, slots=True, frozen=True)
class RecordHeader:
    """What must be the same wherever a record is trained from.

    Example: `RecordHeader(model_type="llama", vocab_size=45, tokenizer="9f2c...", temperature=1.0,
    groups_per_step=16, group_size=8, advantage={"name": "group_normalised"})`.
    """

    model_type: str  # the model's family, by Hugging Face's name
    vocab_size: int
    tokenizer: str  # fingerprint of its vocabulary
    temperature: float  # at which the tokens were sampled
    groups_per_step: int
    group_size: int
    advantage: Mapping[str, Any]  # how the recorded advantages were computed


_KEYS = {
    "model_type": "model.path (the model's family)",
    "vocab_size": "model.path (vocab_size)",
    "tokenizer": "model.tokenizer (fingerprint of its vocabulary)",
    "temperature": "policy.sampling.temperature",
    "groups_per_step": "loop.groups_per_step",
    "group_size": "loop.group_size",
    "advantage": "advantage",
}


@dataclass(kw_only=True, slots=True, frozen=True)
class RecordedBatch:
    """What one step was trained on. Example: `read_batch(record, 1).groups[0].trajectories[0].advantage`."""

    groups: list[Group]  # in the order in which they were packed; of a prompt's row only its text and tokens are there
    rewards: dict[str, Any]  # `reward/*` of that step, which also count the samples that were filtered


@dataclass(kw_only=True, slots=True, frozen=True)
class Record:
    """A record that is there and whole. Example: `record = open_record(Path("runs/toy"))`."""

    folder: Path
    header: RecordHeader
    steps: int  # 1 to `steps` without a gap
    longest: int  # tokens of the longest trajectory
    oldest: int  # the largest age of a trajectory when it was trained
    has_reference: bool  # whether every step has the reference's log-probabilities
    torn: str | None = None  # the name of a last file that was cut short, and is left out


class RecordWriter:
    """Writes the record of a run, step by step."""

    def __init__(self, folder: Path, header: RecordHeader, *, first_step: int = 0) -> None:
        """Args:
        folder: `<run.dir>/record`; it is made.
        header: of this run.
        first_step: where a resumed run goes on; later steps are removed, since they will be done again.

        Raises:
            ConfigError: a resumed run would go on in the record of another model or another way of sampling, or in one
                without the steps that are done.
        """
        there = {step for step, _ in _files(folder)} if folder.is_dir() else set()
        if missing := set(range(1, first_step + 1)) - there:
            raise ConfigError(
                f"loop.record=true with run.resume=true: step {min(missing)} of {first_step} that are done is not in "
                f"{folder}, so that nothing could be trained from the record: set loop.record=false"
            )
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        if (folder / "header.json").exists():
            check_header(read_header(folder), header, folder)
        write_json(folder / "header.json", {"format": _FORMAT, **dataclasses.asdict(header)})
        for step, path in _files(folder):
            if step > first_step:
                path.unlink()

    def write(self, step: int, groups: Sequence[Group], rewards: Mapping[str, Any]) -> None:
        """Write one step, whole or not at all.

        Args:
            step: completed optimizer steps, this one included.
            groups: that it trained, in the order in which they were packed.
            rewards: its `reward/*` metrics.

        Raises:
            ForgeliteError: the file could not be written (the disk is full).
        """
        path = self._folder / f"step-{step:06d}.safetensors"
        unfinished = path.with_suffix(f".{os.getpid()}.tmp")
        members = [t for group in groups for t in group.trajectories]
        try:
            arrays = _arrays(members) | {"batch": np.frombuffer(_described_batch(groups, rewards), np.uint8)}
            unfinished.write_bytes(save(arrays, {"summary": _summary(step, members)}))
            unfinished.replace(path)
        except OSError as error:
            unfinished.unlink(missing_ok=True)
            raise ForgeliteError(f"loop.record=true, but {path} could not be written: {error}") from error


def open_record(path: Path) -> Record:
    """Find a record and look at all of its steps.

    Args:
        path: a record, or the folder of a run that has one.

    Raises:
        ConfigError: there is none, a step is missing in the middle, or a file other than the last one is cut short.
    """
    folder = path / FOLDER if (path / FOLDER).is_dir() else path
    if not (folder / "header.json").exists():
        raise ConfigError(
            f"loop.replay={path}: there is no record in {folder}; a run with loop.record=true makes one, or with "
            "loop.generate_only=true"
        )
    header = read_header(folder)
    summaries: list[Mapping[str, int]] = []
    torn = None
    files = _files(folder)
    for at, (step, file) in enumerate(files, 1):
        if step != at:
            raise ConfigError(f"loop.replay={path}: step {at} is missing in {folder}; the next one there is {step}")
        try:
            with safe_open(file, framework="np") as opened:
                summaries.append(json.loads(opened.metadata()["summary"]))
        except (SafetensorError, OSError, TypeError, KeyError, ValueError) as error:
            if at < len(files):
                raise ConfigError(f"loop.replay={path}: {file} cannot be read: {error}") from None
            torn = file.name
    return Record(
        folder=folder,
        header=header,
        steps=len(summaries),
        longest=max((s["longest"] for s in summaries), default=0),
        oldest=max((s["oldest"] for s in summaries), default=0),
        has_reference=all(s["reference"] for s in summaries),
        torn=torn,
    )


def read_batch(record: Record, step: int) -> RecordedBatch:
    """The batch of step `step`, from 1 to `record.steps`."""
    with safe_open(record.folder / f"step-{step:06d}.safetensors", framework="np") as opened:
        arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
    described = json.loads(arrays.pop("batch").tobytes())
    start, groups = 0, []
    for group in described["groups"]:
        trajectories = []
        for data in group["trajectories"]:
            end = start + data["length"]
            trajectories.append(_trajectory(data, {name: array[start:end] for name, array in arrays.items()}))
            start = end
        prompt = Prompt(**{**group["prompt"], "token_ids": tuple(group["prompt"]["token_ids"])})
        groups.append(Group(group_id=group["group_id"], prompt=prompt, trajectories=trajectories))
    rewards = {k: Rate(**v) if isinstance(v, dict) else v for k, v in described["rewards"].items()}
    return RecordedBatch(groups=groups, rewards=rewards)


def read_header(folder: Path) -> RecordHeader:
    """The header of a record.

    Raises:
        ConfigError: it cannot be read, or is of another format.
    """
    path = folder / "header.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data.pop("format") != _FORMAT:
            raise ValueError("it has another format")
        return RecordHeader(**data)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{path} is not the header of a record: {error}") from None


def check_header(recorded: RecordHeader, wanted: RecordHeader, folder: Path) -> None:
    """Raise ConfigError, naming the key, unless a configuration fits a record.

    Args:
        recorded: the header of the record in `folder`.
        wanted: the header that a run of the configuration would write.
    """
    for name, key in _KEYS.items():
        was, asked = getattr(recorded, name), getattr(wanted, name)
        if was != asked:
            raise ConfigError(f"{key} is {asked}, but the record in {folder} was made with {was}")


def _files(folder: Path) -> list[tuple[int, Path]]:
    """The steps in `folder` with their files, in order."""
    found = ((_STEP.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted((int(match.group(1)), path) for match, path in found if match)


def _arrays(members: Sequence[Trajectory]) -> dict[str, np.ndarray]:
    names = [name for name in _ARRAYS if all(getattr(t, name) is not None for t in members)]
    return {name: np.array([x for t in members for x in getattr(t, name)], _ARRAYS[name]) for name in names}


def _summary(step: int, members: Sequence[Trajectory]) -> str:
    """What `open_record` reads of a step without reading the step."""
    return json.dumps(
        {
            "longest": max((len(t.token_ids) for t in members), default=0),
            "oldest": max((t.age(step - 1) for t in members), default=0),
            "reference": all(t.reference_logprobs is not None for t in members),
        }
    )


def _described_batch(groups: Sequence[Group], rewards: Mapping[str, Any]) -> bytes:
    described = {
        "rewards": {k: dataclasses.asdict(v) if isinstance(v, Rate) else v for k, v in rewards.items()},
        "groups": [
            {
                "group_id": group.group_id,
                "prompt": {
                    "prompt_id": group.prompt.prompt_id,
                    "text": group.prompt.text,
                    "token_ids": list(group.prompt.token_ids),
                },
                "trajectories": [_described(t) for t in group.trajectories],
            }
            for group in groups
        ],
    }
    return json.dumps(described).encode()


def _described(trajectory: Trajectory) -> dict[str, Any]:
    score = trajectory.score
    return {
        **{name: getattr(trajectory, name) for name in _PLAIN},
        "length": len(trajectory.token_ids),
        "spans": [[s.version, s.start, s.end] for s in trajectory.spans],
        "score": None if score is None else {"reward": score.reward, "parts": dict(score.parts)},
    }


def _trajectory(data: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Trajectory:
    return Trajectory(
        **{name: data[name] for name in _PLAIN},
        **{name: array.tolist() for name, array in arrays.items()},
        spans=[VersionSpan(version=version, start=start, end=end) for version, start, end in data["spans"]],
        score=None if data["score"] is None else Score(**data["score"]),
    )
