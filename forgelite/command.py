"""The command line that every app shares: `--config FILE key.sub=value ...`, exit codes, and Ctrl-C.

0   the run did what it was asked to
1   the run failed; the cause is the last line
2   the configuration is wrong, nothing was started
130 interrupted (Ctrl-C, SIGTERM)
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from pydantic import BaseModel

from forgelite.config import describe_keys, load_config
from forgelite.errors import ConfigError, ForgeliteError
from forgelite.mesh.environment import root_environment

C = TypeVar("C", bound=BaseModel)


def run_app(
    schema: type[C],
    main: Callable[[C], Awaitable[None]],
    *,
    name: str,
    description: str,
    argv: Sequence[str] | None = None,
) -> int:
    """Parse the command line, run `main` with the checked configuration, and return the exit code.

    Args:
        schema: the app's configuration class.
        main: the app.
        name: how the app is started, as `python -m` takes it.
        description: the head of `--help`.
        argv: arguments; None takes the process's own.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {name}",
        description=description,
        epilog=_key_table(schema),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="YAML file with the configuration")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="replaces a value of the file")
    arguments = parser.parse_intermixed_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        config = load_config(schema, arguments.config, arguments.overrides)
        os.environ.update(root_environment(os.environ))
        collect_garbage_less_often()
        asyncio.run(_until_terminated(main(config)))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ForgeliteError as error:
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def collect_garbage_less_often() -> None:
    """Let a controller, whose thousands of waiting groups and trajectories are no garbage, search them less often.

    With Python's own thresholds a third of its time goes into that (`benchmarks.pipeline`, 10,000 groups in flight).
    For a process that is the controller and nothing else.
    """
    gc.set_threshold(50_000, 20, 20)


async def _until_terminated(main: Awaitable[None]) -> None:
    """A scheduler's SIGTERM ends a run as cleanly as Ctrl-C does: the app's `finally` blocks run."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await main


def _key_table(schema: type[BaseModel]) -> str:
    lines = ["keys (type, default):", ""]
    for key, kind, default, meaning in describe_keys(schema):
        lines.append(f"  {key}  ({kind}, {default})")
        lines.append(f"      {meaning}")
    return "\n".join(lines)
