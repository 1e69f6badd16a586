"""Where a request goes."""

from __future__ import annotations

from forgelite.policy.routing import Load, Route, Sessions, route


def load(replica: str, members: int, *, requests: int = 1, version: int = 3) -> Load:
    return Load(replica=replica, version=version, open_requests=requests, open_members=members)


def choose(*loads: Load, session: str | None = None, min_version: int = -1, most: int | None = None) -> Route:
    return route(loads, session_replica=session, min_version=min_version, max_open_requests=most)


def test_the_replica_with_the_fewest_open_members_takes_a_request():
    assert choose(load("a", 8), load("b", 2), load("c", 2)).replica == "b"


def test_a_session_stays_on_its_replica_however_loaded_that_is():
    assert choose(load("a", 8), load("b", 2), session="a").replica == "a"


def test_a_session_whose_replica_does_not_serve_goes_to_the_least_loaded():
    assert choose(load("a", 8), load("b", 2), session="gone").replica == "b"


def test_a_session_leaves_a_replica_that_is_full():
    assert choose(load("a", 8, requests=4), load("b", 9, requests=1), session="a", most=4).replica == "b"


def test_a_request_waits_when_every_replica_is_full():
    assert choose(load("a", 8, requests=4), load("b", 9, requests=4), most=4) == Route(replica=None, full=True)


def test_a_request_waits_for_a_replica_of_its_version():
    assert choose(load("a", 0, version=2), min_version=3) == Route(replica=None, full=False)
    assert choose(load("a", 0, version=2), load("b", 9, version=3), session="a", min_version=3).replica == "b"


def test_of_too_many_sessions_the_least_recently_used_is_forgotten():
    sessions = Sessions(most=2)
    for session in ("old", "kept", "old", "new"):
        sessions.went_to(session, f"replica of {session}")

    assert sessions.replica_of("kept") is None
    assert sessions.replica_of("old") == "replica of old"
    assert sessions.replica_of(None) is None
