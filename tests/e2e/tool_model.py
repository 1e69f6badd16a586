"""A tiny model that has learned one thing: to look something up by a tool, and to answer with what the tool said.

Its tokenizer has a token a byte, and one for the whole call, so that a hundred steps teach it both turns.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

CALL = '<tool_call>\n{"name": "lookup", "arguments": {"key": "it"}}\n</tool_call>'
FOUND = "it is 7"
QUESTIONS = ["what is a?", "what is b?", "what is c?", "what is d?"]
_TEMPLATE = """
{%- if tools %}<|im_start|>system
tools:{% for tool in tools %} {{ tool.function.name }}{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def save_tool_model(folder: Path, *, steps: int = 120) -> Path:
    """Train it and write it as a Hugging Face folder. A few seconds."""
    tokenizer = _tokenizer()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads that spin on shared cores make a step a hundred times slower
    try:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = _train(tokenizer, steps)
    finally:
        torch.set_num_threads(threads)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def rows() -> list[dict[str, str]]:
    """A dataset of the questions."""
    return [{"prompt": question} for question in QUESTIONS]


def _tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in ("<|im_start|>", "<|im_end|>", "<pad>")]
    )
    tokenizer.add_tokens([AddedToken(CALL, normalized=False)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<pad>")
    fast.chat_template = _TEMPLATE
    return fast


def _train(tokenizer: PreTrainedTokenizerFast, steps: int) -> Qwen3ForCausalLM:
    model = Qwen3ForCausalLM(
        Qwen3Config(
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            intermediate_size=128,
            vocab_size=288,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
        )
    )
    dialogues = [_dialogue(tokenizer, question) for question in QUESTIONS]
    width = max(len(ids) for ids, _ in dialogues)
    ids = torch.tensor([i + [tokenizer.pad_token_id] * (width - len(i)) for i, _ in dialogues])
    labels = torch.tensor([y + [-100] * (width - len(y)) for _, y in dialogues])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(steps):
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1, f"the tool model has not learned its dialogue: {loss.item()}"
    return model.eval()


def _dialogue(tokenizer: PreTrainedTokenizerFast, question: str) -> tuple[list[int], list[int]]:
    """Tokens and labels; only what the assistant says is learned."""
    ids: list[int] = []
    labels: list[int] = []
    for text, learned in [
        (f"<|im_start|>system\ntools: lookup<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n", False),
        ("<|im_start|>assistant\n", False),
        (f"{CALL}<|im_end|>", True),
        ("\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n", False),
        (f"{FOUND}<|im_end|>", True),
    ]:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        ids += tokens
        labels += tokens if learned else [-100] * len(tokens)
    return ids, labels
