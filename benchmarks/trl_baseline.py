"""The peer of `benchmarks.grpo`: the same GRPO run by TRL's GRPOTrainer, without vLLM.

    .venv-trl/bin/python -m benchmarks.trl_baseline spec.json result.json

It runs in an environment of its own (`make bench-trl-env`), so it imports nothing of forgelite. What is set here
is what makes the two runs equal; everything else is TRL's default. Where TRL cannot be made equal, it has the
advantage:

* it is synchronous, in one process, and samples with the model that it trains: nothing is sent anywhere;
* with one update a batch it takes the ratio to the behaviour policy as 1 and computes no old log-probabilities.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(kw_only=True, slots=True, frozen=True)
class Spec:
    """What is trained. Rows have the columns `prompt` and `answer`; a right answer ends with eos."""

    model: str  # Hugging Face folder with the tokenizer
    rows: list[dict[str, str]]  # to train on, in this order, one a group
    held_out: list[dict[str, str]]
    steps: int
    groups: int  # a step
    group_size: int
    max_tokens: int
    temperature: float
    learning_rate: float
    betas: tuple[float, float]
    weight_decay: float
    max_norm: float
    clip_low: float
    clip_high: float
    beta: float  # weight of the KL term; 0: no reference
    seed: int
    folder: str  # for what TRL may want to write


@dataclass(kw_only=True, slots=True, frozen=True)
class Result:
    """What was measured. Times are of one clock, in seconds."""

    step_ends: list[float]
    accuracy_before: float  # held out, greedy
    accuracy: float


def run(spec: Spec) -> Result:
    """Evaluate, train, evaluate."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(spec.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(spec.model, dtype=torch.float32)
    before = greedy_accuracy(model, tokenizer, spec)
    step_ends = _train(model, tokenizer, spec)
    after = greedy_accuracy(model, tokenizer, spec)
    return Result(step_ends=step_ends, accuracy_before=before, accuracy=after)


def greedy_accuracy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, spec: Spec) -> float:
    """The share of held-out rows that are answered exactly, eos included, by the likeliest tokens."""
    import torch

    prompts = tokenizer([row["prompt"] for row in spec.held_out], return_tensors="pt", padding=True)
    inputs = {name: prompts[name] for name in ("input_ids", "attention_mask")}
    model.eval()
    with torch.no_grad():
        ids = model.generate(**inputs, max_new_tokens=spec.max_tokens, do_sample=False)
    answers = ids[:, inputs["input_ids"].shape[1] :].tolist()
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    rewards = _exact_match(tokenizer.eos_token_id)(
        completions=texts, completion_ids=answers, answer=[row["answer"] for row in spec.held_out]
    )
    return sum(rewards) / len(rewards)


def _train(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, spec: Spec) -> list[float]:
    """Train in place. Returns when each step ended."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    step_ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            step_ends.append(time.perf_counter())

    trainer = GRPOTrainer(
        model=model,
        reward_funcs=_exact_match(tokenizer.eos_token_id),
        args=_grpo_config(spec),
        train_dataset=Dataset.from_list(spec.rows),
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    trainer.train()
    return step_ends


def _grpo_config(spec: Spec) -> Any:
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=spec.folder,
        seed=spec.seed,
        max_steps=spec.steps,
        # one generation batch, one optimizer step: groups x group size
        per_device_train_batch_size=spec.groups * spec.group_size,
        gradient_accumulation_steps=1,
        num_generations=spec.group_size,
        num_iterations=1,
        shuffle_dataset=False,
        # the loss of forgelite's `clip`: token mean over the batch, two clip bounds, k3 to the reference
        loss_type="dapo",
        scale_rewards="group",
        epsilon=spec.clip_low,
        epsilon_high=spec.clip_high,
        beta=spec.beta,
        # sampling
        max_completion_length=spec.max_tokens,
        temperature=spec.temperature,
        top_k=0,
        top_p=1.0,
        # the optimizer
        learning_rate=spec.learning_rate,
        lr_scheduler_type="constant",
        adam_beta1=spec.betas[0],
        adam_beta2=spec.betas[1],
        weight_decay=spec.weight_decay,
        max_grad_norm=spec.max_norm,
        # float32 on the CPU, and nothing on the side
        use_cpu=True,
        bf16=False,
        fp16=False,
        gradient_checkpointing=False,
        dataloader_num_workers=0,
        save_strategy="no",
        report_to=[],
        logging_steps=1,
        disable_tqdm=True,
    )


def _exact_match(eos: int) -> Callable[..., list[float]]:
    """A TRL reward: 1 for the right text followed by eos, else 0."""

    def exact_match(
        completions: Sequence[str], completion_ids: Sequence[Sequence[int]], answer: Sequence[str], **_: Any
    ) -> list[float]:
        return [
            float(eos in ids and text == right)
            for text, ids, right in zip(completions, completion_ids, answer, strict=True)
        ]

    return exact_match


def main(spec_file: str, result_file: str) -> None:
    """Read a `Spec`, write a `Result`, both as JSON."""
    spec = Spec(**json.loads(Path(spec_file).read_text(encoding="utf-8")))
    Path(result_file).write_text(json.dumps(asdict(run(spec))), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
