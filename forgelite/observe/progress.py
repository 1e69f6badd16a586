"""What a person sees while a run goes: a live panel on a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Literal, Protocol

from rich.console import Console
from rich.live import Live
from rich.table import Table

Mode = Literal["auto", "live", "plain", "none"]


class Progress(Protocol):
    """Shows the state of a run."""

    def phase(self, text: str) -> None:
        """What the run is doing outside its steps ("starting the policy")."""
        ...

    def step(self, line: Mapping[str, Any]) -> None:
        """A line of metrics."""
        ...

    def note(self, text: str) -> None:
        """Something the user should know."""
        ...

    def close(self) -> None:
        """Leave the last state on the screen."""
        ...


def make_progress(mode: Mode, steps: int, title: str) -> Progress:
    """Choose a display.

    Args:
        mode: `auto` is `live` on a terminal and `plain` elsewhere.
        steps: steps of the whole run.
        title: what runs.
    """
    if mode == "none":
        return _Silent()
    if mode == "live" or (mode == "auto" and sys.stdout.isatty()):
        return _LivePanel(steps, title)
    return _PlainLines(steps)


ROWS = (
    ("reward", "reward/mean", "{:.3f}"),
    ("held-out, greedy", "eval/reward", "{:.3f}"),
    ("held-out loss", "eval/loss", "{:.4f}"),
    ("loss", "loss/policy", "{:+.4f}"),
    ("loss", "loss/cross_entropy", "{:.4f}"),
    ("KL to reference", "loss/kl_ref", "{:.4f}"),
    ("ratio, largest", "ratio/max", "{:.3f}"),
    ("age, mean", "age/mean", "{:.2f}"),
    ("age, largest", "age/max", "{:.0f}"),
    ("tokens/s", "tokens_per_s/generated", "{:,.0f}"),
    ("idle, trainer", "idle/trainer", "{:.0%}"),
    ("idle, policy", "idle/policy", "{:.0%}"),
)
LEDGER = ("in_flight", "queued", "trained", "rejected", "filtered", "failed", "cancelled")


class _Silent:
    def phase(self, text: str) -> None: ...
    def step(self, line: Mapping[str, Any]) -> None: ...
    def note(self, text: str) -> None: ...
    def close(self) -> None: ...


class _PlainLines:
    """For logs and CI: a line for each event, and for the steps about LINES lines in all."""

    LINES = 40

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def phase(self, text: str) -> None:
        print(text, flush=True)

    def note(self, text: str) -> None:
        print(f"note: {text}", flush=True)

    def step(self, line: Mapping[str, Any]) -> None:
        step = line["step"]
        evaluated = any(line.get(name) is not None for name in ("eval/reward", "eval/loss"))
        if self._steps > self.LINES and step > self.LINES // 2 and step % (self._steps // self.LINES) and not evaluated:
            return
        parts = [f"step {step}/{self._steps}"]
        parts += [f"{label} {form.format(line[key])}" for label, key, form in ROWS if line.get(key) is not None]
        ledger = {s: line[f"ledger/{s}"] for s in LEDGER if line.get(f"ledger/{s}")}
        if ledger:
            parts.append("ledger " + " ".join(f"{s} {n}" for s, n in ledger.items()))
        print(" · ".join(parts), flush=True)

    def close(self) -> None: ...


class _LivePanel:
    """A table that is redrawn in place; values that a step does not bring stay from an earlier one."""

    def __init__(self, steps: int, title: str) -> None:
        self._steps = steps
        self._title = title
        self._seen: dict[str, Any] = {}
        self._phase = ""
        self._console = Console()
        self._live = Live(self._table(), console=self._console, refresh_per_second=8, transient=False)
        self._live.start()

    def phase(self, text: str) -> None:
        self._phase = text
        self._live.update(self._table())

    def note(self, text: str) -> None:
        self._console.print(f"[yellow]note:[/] {text}", highlight=False)

    def step(self, line: Mapping[str, Any]) -> None:
        self._seen |= {name: value for name, value in line.items() if value is not None}
        self._live.update(self._table())

    def close(self) -> None:
        self._live.stop()

    def _table(self) -> Table:
        step = self._seen.get("step", 0)
        done = int(30 * step / self._steps) if self._steps else 30
        table = Table(title=self._title, caption=self._phase or None, show_header=False, min_width=64)
        table.add_column(style="dim")
        table.add_column()
        table.add_row("step", f"{'━' * done}{'╌' * (30 - done)} {step}/{self._steps}")
        for label, key, form in ROWS:
            if key in self._seen:
                table.add_row(label, form.format(self._seen[key]))
        counts = [f"{s} {self._seen[f'ledger/{s}']}" for s in LEDGER if f"ledger/{s}" in self._seen]
        if counts:
            table.add_row("ledger", ", ".join(counts))
        return table
