"""Files in shared memory that have an owner: created whole, and taken away when the owner is gone.

The owner holds an exclusive lock on byte 0 for as long as it lives. Creation and `reclaim` both take that
lock and then look whether the path still names the file they have locked, so neither can pull a file from
under the other.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from pathlib import Path

from forgelite.errors import WeightError
from forgelite.weights import locks

PREFIX = "forgelite-"
SUFFIX = ".weights"
OWNER_BYTE = 0

_RUN_ID = r"[A-Za-z0-9._-]{1,100}"


def create(folder: Path, run_id: str) -> tuple[int, Path]:
    """Create an empty file under a temporary name and become its owner.

    Args:
        folder: a folder on a memory file system.
        run_id: a word of the file name: letters, digits, `.`, `_` and `-`.

    Returns:
        A read-write descriptor and the temporary path. `show` gives the file its final name.

    Raises:
        ValueError: `run_id` cannot be part of a file name.
    """
    _check_run_id(run_id)
    while True:
        name = f"{PREFIX}{run_id}-{os.getpid()}-{secrets.token_hex(4)}{SUFFIX}.tmp"
        path = folder / name
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        # Between these two lines `reclaim` may take the file for an abandoned one: then another is made.
        if locks.try_lock(descriptor, OWNER_BYTE, exclusive=True) and _names(path, descriptor):
            return descriptor, path
        os.close(descriptor)


def reserve(descriptor: int, nbytes: int, folder: Path) -> None:
    """Give the file `nbytes` of real memory: a lack of it is an error now, and not a SIGBUS at a write.

    Raises:
        WeightError: there is not so much memory; the message holds the bytes needed and free.
    """
    if nbytes > _free_bytes(folder):
        raise _refusal(nbytes, folder)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EFBIG, errno.ENOMEM):
            raise _refusal(nbytes, folder) from error
        raise


def show(path: Path) -> Path:
    """Give a finished file its final name; returns it."""
    final = path.with_suffix("")
    os.rename(path, final)
    return final


def owner_is_alive(descriptor: int) -> bool:
    """Whether another open file description owns this file."""
    return locks.is_locked(descriptor, OWNER_BYTE)


def reclaim(folder: Path, run_id: str | None = None) -> list[Path]:
    """Remove the files whose owner is gone, half-created ones too. Files of live owners are never touched.

    Readers that still map a removed file keep their mapping until they let it go.

    Args:
        folder: where to look.
        run_id: only the files of this run; None: of every run of this user.

    Returns:
        The removed paths.
    """
    if run_id is not None:
        _check_run_id(run_id)
    run = _RUN_ID if run_id is None else re.escape(run_id)
    name = re.compile(rf"{re.escape(PREFIX)}{run}-\d+-[0-9a-f]{{8}}{re.escape(SUFFIX)}(\.tmp)?")
    candidates = sorted(path for path in folder.iterdir() if name.fullmatch(path.name))
    return [path for path in candidates if _remove_if_abandoned(path)]


def _free_bytes(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def _refusal(nbytes: int, folder: Path) -> WeightError:
    return WeightError(
        f"the weights need {nbytes} bytes in {folder}, which has {_free_bytes(folder)} bytes free; "
        f"lower weights.retain or enlarge {folder}"
    )


def _check_run_id(run_id: str) -> None:
    if not re.fullmatch(_RUN_ID, run_id):
        raise ValueError(f"run id {run_id!r} must be 1 to 100 letters, digits, '.', '_' or '-'")


def _remove_if_abandoned(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EACCES, errno.ELOOP):  # gone meanwhile, foreign, a link
            return False
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            return False
        if not locks.try_lock(descriptor, OWNER_BYTE, exclusive=True) or not _names(path, descriptor):
            return False
        path.unlink()
        return True
    finally:
        os.close(descriptor)


def _names(path: Path, descriptor: int) -> bool:
    try:
        status = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(status, os.fstat(descriptor))
