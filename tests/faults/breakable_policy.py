"""A policy actor whose engine can be made to raise, as a bug in it would."""

from __future__ import annotations

from typing import Any, Literal, NoReturn

from monarch.actor import concurrent_endpoint

from forgelite.policy.actor import PolicyActor


def _explode(*_: Any) -> NoReturn:
    raise RuntimeError("an injected fault")


class BreakablePolicyActor(PolicyActor):
    """A `PolicyActor` with one endpoint more."""

    @concurrent_endpoint
    async def inject(self, where: Literal["step", "swap"]) -> None:
        """Let the next step raise, or the next swap of weights half-way through it."""
        engine = self._running()._engine
        if where == "step":
            engine.step = _explode
        else:
            engine.prepare_weights = lambda tensors: _explode
