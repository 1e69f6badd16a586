"""Which tensors lie side by side in a slot, so that an engine can use several of them as one, in place.

vLLM computes with the query, key and value projections of a layer as one matrix, and with the gate and up
projections as another, and pads the rows of the vocabulary. Where the members follow one another without a gap,
and the padding is reserved, such a matrix is a view of the slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

VOCABULARY_ROWS = 64  # vLLM pads the vocabulary to a multiple of so many rows

_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_EXPERTS = ".experts."  # fused over the experts as well, in a layout of the kernel's own: never a view
_VOCABULARY = ("embed_tokens.weight", "lm_head.weight")


class Described(Protocol):
    """What is looked at of a tensor."""

    @property
    def shape(self) -> Iterable[int]: ...

    @property
    def dtype(self) -> object: ...


def side_by_side(tensors: Mapping[str, Described]) -> Iterator[tuple[str, ...]]:
    """The names in groups that are to follow one another without a gap; most groups have one name.

    Example: `model.layers.0.self_attn.{q,k,v}_proj.weight` are a group.

    Args:
        tensors: by checkpoint name. The groups come in the order of their first members.
    """
    done: set[str] = set()
    for name in tensors:
        if name not in done:
            group = _group_of(name, tensors)
            done.update(group)
            yield group


def padded_rows(name: str, rows: int) -> int:
    """How many rows to reserve for a tensor that has `rows` of them."""
    return -(-rows // VOCABULARY_ROWS) * VOCABULARY_ROWS if name.endswith(_VOCABULARY) else rows


def _group_of(name: str, tensors: Mapping[str, Described]) -> tuple[str, ...]:
    for members in _FUSED:
        for member in members:
            before, found, after = name.rpartition(f".{member}.")
            if not found or _EXPERTS in name:
                continue
            group = tuple(f"{before}.{other}.{after}" for other in members)
            if all(other in tensors for other in group) and _stackable([tensors[other] for other in group]):
                return group
    return (name,)


def _stackable(tensors: Iterable[Described]) -> bool:
    """Whether the tensors differ in their numbers of rows only."""
    forms = {(tensor.dtype, len(shape := tuple(tensor.shape)), shape[1:]) for tensor in tensors}
    return len(forms) == 1 and all(rank > 0 for _, rank, _ in forms)
