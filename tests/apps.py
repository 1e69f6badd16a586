"""Run the apps as a user does, in a process of their own, and look at what they leave behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
SHARED_MEMORY = Path("/dev/shm")


@dataclass(kw_only=True, slots=True, frozen=True)
class Finished:
    """How an app ended."""

    returncode: int
    output: str  # stdout and stderr together


def run_app(module: str, *arguments: str, timeout_s: float = 240.0) -> Finished:
    """Run `python -m module arguments` to its end."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    return Finished(returncode=done.returncode, output=done.stdout)


class RunningApp:
    """An app that runs beside the test."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self._log = log

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_for_output(self, text: str, timeout_s: float = 120.0) -> None:
        """Wait until the app has printed `text`; fail with its output if it ends first or does not."""
        until(lambda: text in self.output or self.process.poll() is not None, timeout_s, lambda: self.output)
        assert text in self.output, self.output

    def wait(self, timeout_s: float) -> int:
        """Wait for the end; returns the exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the app did not end within {timeout_s} s:\n{self.output}") from None

    def descendants(self) -> list[psutil.Process]:
        """Every process that the app has started."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def station(self, name: str) -> psutil.Process:
        """The process of one station."""
        return next(p for p in self.descendants() if p.environ().get("FORGELITE_STATION") == name)


@contextmanager
def running_app(log: Path, module: str, *arguments: str) -> Iterator[RunningApp]:
    """Start `python -m module arguments`; whatever is left of it at the end of the block is killed."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            stdout=out,
            stderr=subprocess.STDOUT,
            # Where the tests run in the background of a shell, Ctrl-C is ignored, and children inherit that.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )
    app = RunningApp(process, log)
    try:
        yield app
    finally:
        left = app.descendants() if process.poll() is None else []
        for each in [process, *left]:
            if each.poll() is None if isinstance(each, subprocess.Popen) else each.is_running():
                each.send_signal(signal.SIGKILL)
        process.wait(10)


def until(condition: Callable[[], bool], timeout_s: float, describe: Callable[[], str] = lambda: "") -> None:
    """Wait for a condition that nothing can notify us of."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"not within {timeout_s} s: {describe()}"
        time.sleep(0.05)


def is_gone(process: psutil.Process) -> bool:
    """Whether a process has ended; one that only waits to be reaped has."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def shared_memory_of(run: str) -> list[str]:
    """The shared-memory files of a run, by the name of its folder."""
    return sorted(p.name for p in SHARED_MEMORY.iterdir() if p.name.startswith(f"forgelite-{run}-"))


def toy_arguments(warm_start: Path, folder: Path, *overrides: str) -> list[str]:
    """The command line of a GRPO run on the toy's warm start."""
    return [
        "--config",
        "configs/grpo/toy.yaml",
        f"run.dir={folder}",
        f"model.path={warm_start / 'checkpoints' / 'hf'}",
        "metrics.tensorboard=false",
        *overrides,
    ]
