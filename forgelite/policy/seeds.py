"""Which seed each member of a group is sampled with.

vLLM's own rule, `seed + member`, makes groups with neighbouring seeds share most of their samples, and
requests without a seed share one generator, so that what they draw depends on who else is in the batch. Here
every member has a seed of its own: a hash, so that equal inputs repeat and different inputs have nothing in
common.
"""

from __future__ import annotations

import hashlib
from collections import Counter

from forgelite.types import GroupRequest

_MOST_IDS = 1_000_000  # that are remembered: a policy that only serves never has another version


class MemberSeeds:
    """The seeds of the requests that one engine is given."""

    def __init__(self, engine_seed: int) -> None:
        """Requests without a seed derive theirs from `engine_seed`."""
        self._engine_seed = engine_seed
        self._version: int | None = None
        self._occurrences: Counter[str] = Counter()  # of each id that came without a seed, since the last clearing
        self._clearings = 0  # during this version

    def of(self, request: GroupRequest, version: int) -> list[int]:
        """One seed for each member, each in [0, 2^63).

        A request with a seed has the same ones in every engine, under every id and version. One without has
        those of its id and version, and not of the order of arrival, which makes a run repeatable whose
        requests arrive in another order; an id that is used again, or under new weights, has others.

        Args:
            request: what is asked for.
            version: of the weights that its first token will be sampled with.
        """
        seed = request.sampling.seed
        if seed is not None:
            return [_hashed("given", seed, member) for member in range(request.n)]
        if version != self._version:
            self._version, self._clearings = version, 0
            self._occurrences.clear()
        if len(self._occurrences) >= _MOST_IDS:
            self._clearings += 1
            self._occurrences.clear()
        again = (self._clearings, self._occurrences[request.request_id])
        drawn = ("drawn", self._engine_seed, version, request.request_id, again)
        self._occurrences[request.request_id] += 1
        return [_hashed(*drawn, member) for member in range(request.n)]


def continued(seed: int, tokens: int) -> int:
    """The seed of a sequence that is given to an engine again, after its first `tokens` tokens.

    With the member's own seed the engine would draw the random numbers of the first tokens once more, and the
    continuation would depend on what is in it already. A cut before the first token changes nothing.

    Args:
        seed: of the member.
        tokens: that it has when it is resubmitted.
    """
    return _hashed("continued", seed, tokens) if tokens else seed


def _hashed(*parts: object) -> int:
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # 63 bits: torch.Generator takes a signed 64-bit number
