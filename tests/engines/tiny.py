"""Tiny models and batches for the tests of the trainer and the reference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from forgelite.config import ModelConfig
from forgelite.types import TrainingBatch

VOCAB = 48


def model_config(folder: Path) -> ModelConfig:
    return ModelConfig(path=str(folder))


def save_llama(folder: Path, **options: object) -> Path:
    """A two-layer Llama with grouped queries, random but fixed, as transformers writes it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": VOCAB,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**(sizes | options))).save_pretrained(folder)
    return folder


def save_qwen3(folder: Path, **options: object) -> Path:
    """A two-layer Qwen3 with a tied head and a head size of its own."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 96,
        "vocab_size": VOCAB,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen3ForCausalLM(Qwen3Config(**(sizes | options))).save_pretrained(folder)
    return folder


def save_qwen3_moe(folder: Path) -> Path:
    """A two-layer Qwen3 with four experts, of which each token uses two."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = Qwen3MoeConfig(
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            intermediate_size=96,
            moe_intermediate_size=32,
            num_experts=4,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            vocab_size=VOCAB,
            max_position_embeddings=128,
            initializer_range=0.2,
        )
        Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def sequences(count: int = 8, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Sequences of different lengths with prompts of different lengths; numbers as after scoring."""
    generator = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(count):
        prompt = int(torch.randint(1, 5, (), generator=generator))
        length = prompt + int(torch.randint(2, 8, (), generator=generator))
        out.append(
            {
                "token_ids": torch.randint(0, VOCAB, (length,), generator=generator),
                "loss_mask": torch.arange(length) >= prompt,
                "logprobs": -4.0 + 0.5 * torch.randn(length, generator=generator),
                "versions": torch.zeros(length, dtype=torch.int32),
                "advantages": torch.randn((), generator=generator).expand(length),
                "reference_logprobs": -4.0 + 0.5 * torch.randn(length, generator=generator),
            }
        )
    return out


def pack_rows(
    samples: Sequence[dict[str, torch.Tensor]], rows: Sequence[Sequence[int]], *, garbage: float = 0.0
) -> TrainingBatch:
    """A batch whose row r holds the samples `rows[r]`, then padding, as long as the longest row needs.

    Float numbers at padding and at masked places are `garbage`, which a loss must not see.
    """
    width = max(sum(len(samples[i]["token_ids"]) for i in row) for row in rows)
    shape = (len(rows), width)
    batch = TrainingBatch(
        token_ids=torch.zeros(shape, dtype=torch.int64),
        positions=torch.zeros(shape, dtype=torch.int64),
        sequence_ids=torch.full(shape, -1, dtype=torch.int32),
        loss_mask=torch.zeros(shape, dtype=torch.bool),
        logprobs=torch.zeros(shape),
        versions=torch.full(shape, -1, dtype=torch.int32),
        advantages=torch.zeros(shape),
        reference_logprobs=torch.zeros(shape),
    )
    for r, row in enumerate(rows):
        start = 0
        for i in row:
            end = start + len(samples[i]["token_ids"])
            for name, values in samples[i].items():
                getattr(batch, name)[r, start:end] = values
            batch.positions[r, start:end] = torch.arange(end - start)
            batch.sequence_ids[r, start:end] = i
            start = end
        batch.positions[r, start:] = torch.arange(width - start)
    for name in ("logprobs", "advantages", "reference_logprobs"):
        getattr(batch, name).masked_fill_(~batch.loss_mask, garbage)
    return batch


def one_each(samples: Sequence[dict[str, torch.Tensor]]) -> TrainingBatch:
    """Every sample in a row of its own."""
    return pack_rows(samples, [[i] for i in range(len(samples))])
