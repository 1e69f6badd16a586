from __future__ import annotations

import pytest

from forgelite.errors import ConfigError
from forgelite.weights.carriers import choose_carrier


@pytest.mark.parametrize(("hosts", "chosen"), [({"a"}, "shm"), ({"a", "b"}, "rdma")])
def test_the_topology_chooses_the_carrier(hosts: set[str], chosen: str) -> None:
    assert choose_carrier("auto", hosts) == chosen


@pytest.mark.parametrize("asked", ["rdma", "torchstore", "filesystem"])
def test_what_was_asked_for_is_taken(asked: str) -> None:
    assert choose_carrier(asked, {"a"}) == choose_carrier(asked, {"a", "b"}) == asked


def test_shared_memory_between_hosts_is_an_error_that_names_them() -> None:
    with pytest.raises(ConfigError, match=r"weights.carrier=shm, but .* \['a', 'b'\].*set weights.carrier=rdma"):
        choose_carrier("shm", {"a", "b"})
