"""One process of a trainer with several: trains what it is told and writes down what it saw.

Run as `python -m tests.engines.trainer_rank RANK WORLD PORT FOLDER`, by `test_trainer_ranks.py`. All cases
run in the same processes, one after the other, because starting them takes longer than running them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from forgelite.config import TrainerConfig
from forgelite.config.corrections import Veto
from forgelite.config.loss import ClipLossConfig
from forgelite.errors import TrainingDiverged
from forgelite.trainer.ranks import Rank
from forgelite.trainer.trainer import Trainer
from forgelite.types import TrainingBatch
from tests.engines.tiny import model_config, one_each, pack_rows, sequences

SAMPLES = sequences()
# What is counted or averaged over the whole batch must be the same in several processes.
LOSS = ClipLossConfig(
    kl_coefficient=0.1, aggregation="sequence_mean", whiten_advantages=True, corrections=[Veto(lowest=0.2)]
)
CASES = {  # name: model folder, trainer.parallelism
    "fsdp, llama": ("llama", {}),
    "fsdp, tied qwen3": ("qwen3", {}),
    "replicated, llama": ("llama", {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1}),
    "tensor parallel, llama": ("llama", {"tensor_parallel_degree": 2}),
    "tensor parallel, tied qwen3": ("qwen3", {"tensor_parallel_degree": 2}),
}


def batches() -> list[TrainingBatch]:
    """Rows for every rank, then fewer rows than ranks, then an odd number."""
    rows = [[[i] for i in range(8)], [list(range(8))], [[0, 1], [2, 3], [4, 5]]]
    return [pack_rows(SAMPLES, packed) for packed in rows]


def trainer_config(parallelism: dict) -> TrainerConfig:
    return TrainerConfig.model_validate(
        {
            # a large epsilon keeps AdamW from blowing rounding errors of tiny gradients up to whole steps
            "optimizer": {"lr": 1e-2, "eps": 1e-2},
            "training": {"seq_len": 100, "local_batch_size": 2},
            "parallelism": parallelism,
        }
    )


def run(model: Path, parallelism: dict, rank: Rank | None, out: Path) -> dict:
    """Train the batches and write what must be the same in a single process and in several."""
    trainer = Trainer.build(model_config(model), trainer_config(parallelism), LOSS, steps=9, rank=rank)
    start = {name: tensor.clone() for name, tensor in trainer.export_hf()}
    seen: dict = {"loss": trainer.evaluate(batches()[0])}
    seen["steps"] = [dict(trainer.train_step(batch).metrics) for batch in batches()]
    bad = one_each(SAMPLES)
    bad.advantages[1, :] = float("nan")  # a row of the second rank only
    try:
        trainer.train_step(bad)
    except TrainingDiverged:
        seen["diverged_at"] = trainer.version
    trainer.save(out / "state")
    trainer.save_hf(out / "hf")
    seen["after"] = trainer.train_step(batches()[0]).metrics["loss/policy"]
    trainer.load(out / "state")
    seen["after_resume"] = trainer.train_step(batches()[0]).metrics["loss/policy"]
    if trainer.is_first_rank:
        torch.save(start, out / "start.pt")
    trainer.close()
    return seen


def main(rank: int, world: int, port: int, folder: Path) -> None:
    """Run every case, each with a process group of its own."""
    for number, (name, (model, parallelism)) in enumerate(CASES.items()):
        place = Rank(
            rank=rank,
            world_size=world,
            local_rank=rank,
            master_addr="127.0.0.1",
            master_port=port + number,
        )
        out = folder / name
        out.mkdir(exist_ok=True)
        (out / f"rank{rank}.json").write_text(json.dumps(run(folder / model, parallelism, place, out)))


if __name__ == "__main__":
    main(*(int(text) for text in sys.argv[1:4]), Path(sys.argv[4]))
