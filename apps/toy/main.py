"""Build the toy's starting point: a tiny Llama with random weights and a tokenizer of single characters.

python -m apps.toy.main [folder]        default: runs/toy-base
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

VOCABULARY = ["<pad>", "<eos>", *"abcdefghijklmnopqrstuvwxyz0123456789+-=>:? "]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, `<eos>` at the end of an answer."""
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(VOCABULARY)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def build_model(seed: int = 0) -> LlamaForCausalLM:
    """0.40 million parameters; a head size of 32, the smallest that vLLM serves on a CPU."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(VOCABULARY),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            tie_word_embeddings=True,
            rope_theta=10000.0,
            pad_token_id=VOCABULARY.index("<pad>"),
            eos_token_id=VOCABULARY.index("<eos>"),
            bos_token_id=None,
        )
    )


def main(folder: str = "runs/toy-base") -> None:
    """Write the model and the tokenizer as a Hugging Face folder."""
    logging.disable_progress_bar()
    Path(folder).mkdir(parents=True, exist_ok=True)
    build_model().save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
