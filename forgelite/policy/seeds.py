"""Which seed each member of a group is sampled with.

vLLM's own rule, `seed + member`, makes groups with neighbouring seeds share most of their samples, and
requests without a seed share one generator, so that what they draw depends on who else is in the batch. Here
every member has a seed of its own: a hash, so that equal inputs repeat and different inputs have nothing in
common.
"""

from __future__ import annotations

import hashlib


def given_seed(seed: int, member: int) -> int:
    """The seed of one member of a group whose request carries a seed: the same in every engine and every
    run."""
    return _hashed("given", seed, member)


def drawn_seed(engine_seed: int, request_id: str, occurrence: int, member: int) -> int:
    """The seed of one member of a group whose request carries none.

    Args:
        engine_seed: of the engine, from the config.
        request_id: of the group. Naming it, and not the order of arrival, makes a run repeatable whose
            requests arrive in another order.
        occurrence: how often this engine has seen the id before, so that an id used twice does not decode
            alike.
        member: index in the group.
    """
    return _hashed("drawn", engine_seed, request_id, occurrence, member)


def _hashed(*parts: object) -> int:
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # 63 bits: torch.Generator takes a signed 64-bit number
