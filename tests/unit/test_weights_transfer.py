from __future__ import annotations

import pytest
import torch

from forgelite.weights.fingerprint import fingerprint_of, tensor_digest
from forgelite.weights.reading import read_into
from forgelite.weights.transfer import BLOCK_BYTES, copy, copy_digested, copy_many
from tests.unit.weights_memory import awkward_tensors, same_bits


@pytest.mark.parametrize("name", list(awkward_tensors()))
def test_a_digested_copy_is_exact_and_its_digest_is_that_of_the_target(name: str) -> None:
    source = awkward_tensors()[name]
    target = torch.empty(source.shape, dtype=source.dtype)
    digest = copy_digested(target, source)
    assert same_bits(target, source)
    assert digest == tensor_digest(target)


@pytest.mark.parametrize("elements", [BLOCK_BYTES // 4 - 1, BLOCK_BYTES // 4, BLOCK_BYTES // 4 + 1, BLOCK_BYTES])
def test_a_tensor_of_several_blocks_has_the_digest_of_all_its_bytes(elements: int) -> None:
    source = torch.randn(elements)
    same, half = torch.zeros(elements), torch.zeros(elements, dtype=torch.bfloat16)
    assert copy_digested(same, source) == tensor_digest(source)
    assert torch.equal(same, source)
    assert copy_digested(half, source) == tensor_digest(source.bfloat16())
    assert torch.equal(half, source.bfloat16())


def test_a_copy_converts_strides_and_types() -> None:
    source = torch.randn(6, 8)
    target = torch.zeros(8, 6, dtype=torch.float64)
    copy(target.t(), source)
    assert torch.equal(target, source.t().double())


def test_a_copy_into_a_parameter_needs_no_gradient_mode() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    copy_digested(parameter, torch.ones(3))
    assert torch.equal(parameter.data, torch.ones(3))


def test_the_fingerprint_of_a_read_is_that_of_what_arrived_when_targets_overlap() -> None:
    source = {"a": torch.zeros(4), "b": torch.ones(4)}
    shared = torch.zeros(6)
    into = {"a": shared[:4], "b": shared[2:]}  # the second overwrites half of the first
    assert read_into(into, source, digested=True) == fingerprint_of(into) != fingerprint_of(source)


def test_the_fingerprint_of_a_read_is_that_of_what_arrived_when_only_the_targets_are_tied() -> None:
    source = {"a": torch.zeros(4), "b": torch.ones(4)}
    shared = torch.zeros(4)
    into = {"a": shared, "b": shared}
    assert read_into(into, source, digested=True) == fingerprint_of(into) != fingerprint_of(source)


def test_tied_tensors_arrive_in_separate_targets() -> None:
    weight = torch.randn(4)
    source = {"embedding": weight, "lm_head": weight}
    into = {"embedding": torch.zeros(4), "lm_head": torch.zeros(4)}
    assert read_into(into, source, digested=True) == fingerprint_of(source)
    assert all(torch.equal(into[name], weight) for name in into)


def test_a_target_of_another_shape_is_an_error_and_not_a_write_beyond_its_end() -> None:
    with pytest.raises(RuntimeError, match="size"):
        copy_many([(torch.zeros(2), torch.zeros(3))], digested=True)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_that_share_a_copy_bring_every_tensor_and_its_digest_to_its_place(threads: int) -> None:
    sources = [torch.randn(1 + 1000 * (i % 7)) for i in range(40)]
    targets = [torch.zeros_like(source) for source in sources]
    digests = copy_many(list(zip(targets, sources, strict=True)), digested=True, threads=threads)
    assert digests == [tensor_digest(source) for source in sources]
    assert all(torch.equal(target, source) for target, source in zip(targets, sources, strict=True))


def test_an_error_in_one_of_the_threads_that_share_a_copy_is_raised() -> None:
    pairs = [(torch.zeros(3), torch.ones(3)), (torch.zeros(2), torch.ones(3))]
    with pytest.raises(RuntimeError, match="size"):
        copy_many(pairs, digested=False, threads=2)
