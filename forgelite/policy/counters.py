"""The counters of replicas as one, while their processes come and go."""

from __future__ import annotations

from forgelite.policy.engine_protocol import EngineStats


class Counters:
    """Totals that never fall, however often processes come and go."""

    def __init__(self) -> None:
        self.busy_s = 0.0
        self.steps = 0
        self.generated_tokens = 0
        self._mean_busy_s = 0.0  # what has been told of `busy_s`
        self._told_busy_s = 0.0  # the total behind it

    def add(self, stats: EngineStats) -> None:
        """Add the final counters of a process that is gone."""
        self.busy_s += stats.busy_s
        self.steps += stats.steps
        self.generated_tokens += stats.generated_tokens

    def with_running(self, running: list[EngineStats], *, version: int, current: list[EngineStats]) -> EngineStats:
        """The totals of processes gone and running.

        Args:
            running: the last counters of each process that lives.
            version: of the service.
            current: those of processes that have just answered.
        """
        busy_s = self.busy_s + sum(stats.busy_s for stats in running)
        self._mean_busy_s += (busy_s - self._told_busy_s) / max(len(running), 1)
        self._told_busy_s = busy_s
        return EngineStats(
            version=version,
            alive_s=max((stats.alive_s for stats in running), default=0.0),
            busy_s=self._mean_busy_s,
            steps=self.steps + sum(stats.steps for stats in running),
            generated_tokens=self.generated_tokens + sum(stats.generated_tokens for stats in running),
            running=sum(stats.running for stats in current),
            waiting=sum(stats.waiting for stats in current),
            last_step_age_s=max((stats.last_step_age_s for stats in current), default=0.0),
            first_versions=_oldest(current),
        )


def _oldest(current: list[EngineStats]) -> dict[str, int]:
    """The members of one session may be sampled by several replicas."""
    versions: dict[str, int] = {}
    for stats in current:
        for session, version in stats.first_versions.items():
            versions[session] = min(version, versions.get(session, version))
    return versions
