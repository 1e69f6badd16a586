"""Open-file-description locks on single bytes of a file.

The kernel drops such a lock when the last descriptor of the open file description is closed, so the lock of a
killed process is free at once: a lease needs no time-out and no heartbeat. POSIX locks (`fcntl.lockf`) do not
serve: they vanish when *any* descriptor of the file is closed in the process, and they do not conflict
between two holders in one process.

A lock belongs to one `os.open`. Two holders in a process need a descriptor each, `fork` shares the lock with
the child, and `exec` drops it, because Python opens files with close-on-exec.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import struct
from pathlib import Path

# struct flock of 64-bit Linux: l_type, l_whence, l_start, l_len, l_pid
_FLOCK = "hhqqi4x"


def _request(kind: int, byte: int) -> bytes:
    # l_pid must be 0 for open-file-description locks (fcntl(2))
    return struct.pack(_FLOCK, kind, os.SEEK_SET, byte, 1, 0)


def try_lock(descriptor: int, byte: int, *, exclusive: bool) -> bool:
    """Take the lock on `byte` without waiting; False when another holder excludes it.

    A shared lock needs a readable descriptor, an exclusive one a writable descriptor.
    """
    kind = fcntl.F_WRLCK if exclusive else fcntl.F_RDLCK
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _request(kind, byte))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def unlock(descriptor: int, byte: int) -> None:
    """Give the lock on `byte` back; harmless when it is not held."""
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _request(fcntl.F_UNLCK, byte))


def is_locked(descriptor: int, byte: int) -> bool:
    """Whether an open file description other than this one holds a lock on `byte`."""
    answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _request(fcntl.F_WRLCK, byte))
    return struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK


def holders(descriptor: int, byte: int) -> list[int]:
    """The ids of the processes that hold a lock on `byte`, as far as this user may look; for error messages.

    The kernel reports no process id for these locks (`F_OFD_GETLK` gives -1), but lists each one in the
    `fdinfo` of the descriptor that holds it. This reads all of /proc and is slow.
    """
    inode = os.fstat(descriptor).st_ino
    found: set[int] = set()
    for info in glob.iglob("/proc/[0-9]*/fdinfo/*"):  # passes over processes that end meanwhile
        try:
            lines = Path(info).read_text().splitlines()
        except OSError:  # closed meanwhile, or somebody else's
            continue
        if any(_locks_byte(line, inode, byte) for line in lines):
            found.add(int(info.split("/")[2]))
    return sorted(found)


def _locks_byte(line: str, inode: int, byte: int) -> bool:
    # lock:  1: OFDLCK  ADVISORY  READ -1 00:1a:4711 1 1
    words = line.split()
    if len(words) != 9 or words[0] != "lock:" or words[2] != "OFDLCK":
        return False
    return int(words[6].rsplit(":", 1)[1]) == inode and int(words[7]) == byte
