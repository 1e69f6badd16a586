"""Two network namespaces with a cable between them: two hosts on one machine, for tests and measurements.

Needs root and iproute2. Every namespace has a host name of its own, because libraries compare names to tell hosts
apart. What is made here is taken away again, also when a test fails; what a killed program has left, by the next one.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(kw_only=True, slots=True, frozen=True)
class NamespaceHost:
    """One end of the cable.

    Example: `NamespaceHost(name="flA4711", address="10.77.0.1", device="flA4711")`.
    """

    name: str  # of the namespace, and host name of its processes
    address: str
    device: str  # its end of the cable

    def start(
        self, command: Sequence[str], *, environment: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        """Start a program on this host; options as for `subprocess.Popen`."""
        program = ["ip", "netns", "exec", self.name, "unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"']
        return subprocess.Popen(
            [*program, self.name, *command], env=os.environ | (environment or {}), text=True, **options
        )

    def set_link(self, state: str) -> None:
        """`down` pulls the cable out, `up` puts it back."""
        _ip("-n", self.name, "link", "set", self.device, state)


def obstacle() -> str | None:
    """Why namespaces cannot be made here; None when they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [program for program in ("ip", "unshare") if shutil.which(program) is None]
    if missing:
        return f"{' and '.join(missing)} not found (iproute2, util-linux)"
    probe = f"fl{os.getpid()}probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"no network namespace can be made: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", probe], check=True)
    return None


def reclaim() -> list[str]:
    """Remove the namespaces whose maker is dead; those of a living one are never touched. Returns their names."""
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout.split()
    names = [name for name in listed if (match := re.fullmatch(r"fl[ab](\d+)", name)) and not _lives(match.group(1))]
    for name in names:
        _ip("netns", "del", name)
    return names


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[NamespaceHost, NamespaceHost]]:
    """Two hosts that reach one another, and nobody else, by 10.77.0.1 and 10.77.0.2."""
    reclaim()
    hosts = tuple(
        NamespaceHost(name=f"fl{letter}{os.getpid()}", address=f"10.77.0.{number}", device=f"fl{letter}{os.getpid()}")
        for number, letter in enumerate("ab", start=1)
    )
    first, second = hosts
    made = []
    try:
        for host in hosts:
            _ip("netns", "add", host.name)
            made.append(host)
        cable = ("type", "veth", "peer", "name", second.device, "netns", second.name)
        _ip("link", "add", first.device, "netns", first.name, *cable)
        for host in hosts:
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.device)
            _ip("-n", host.name, "link", "set", host.device, "up")
            _ip("-n", host.name, "link", "set", "lo", "up")
        yield first, second
    finally:
        for host in made:
            _ip("netns", "del", host.name)  # the cable goes with it


def _lives(process: str) -> bool:
    return Path("/proc", process).exists()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
