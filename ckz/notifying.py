"""Waiting for something to happen in a directory: told by the kernel where it can, else by time."""

from __future__ import annotations

import ctypes
import os
import select
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# What other machines do on these the kernel here does not see (statfs(2), f_type).
_REMOTE = {
    0x6969,  # NFS
    0xFF534D42,  # CIFS
    0xFE534D42,  # SMB2
    0x0BD00BD0,  # Lustre
    0x65735546,  # FUSE
    0x47504653,  # GPFS
    0x00C36400,  # Ceph
    0x19830326,  # BeeGFS
    0x01021997,  # 9p
    0x786F4256,  # VirtualBox
}
# inotify(7): made or moved here, closed after writing.
_EVENTS = 0x00000100 | 0x00000080 | 0x00000008
_NONBLOCK, _CLOEXEC = os.O_NONBLOCK, os.O_CLOEXEC


@contextmanager
def open_waiter(directory: Path) -> Iterator[int]:
    """Open what ``wait`` waits on: a descriptor, or -1 where there is only time."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = -1
    if not _is_remote(libc, directory):
        try:
            fd = libc.inotify_init1(_NONBLOCK | _CLOEXEC)
        except AttributeError:
            fd = -1
    try:
        if fd >= 0 and libc.inotify_add_watch(fd, os.fsencode(directory), _EVENTS) < 0:
            os.close(fd)
            fd = -1
        yield fd
    finally:
        if fd >= 0:
            os.close(fd)


def _is_remote(libc: ctypes.CDLL, directory: Path) -> bool:
    # struct statfs begins with f_type, a word wide on 64-bit Linux.
    buffer = ctypes.create_string_buffer(512)
    try:
        if libc.statfs(os.fsencode(directory), buffer) != 0:
            return True
    except AttributeError:
        return True
    return int.from_bytes(buffer.raw[:4], "little") in _REMOTE


def wait(fd: int, seconds: float) -> None:
    """Sleep, at most so long; less where something happens, but not for every file of a burst."""
    if fd < 0:
        time.sleep(seconds)
        return
    ready, _, _ = select.select([fd], [], [], seconds)
    if ready:
        time.sleep(min(0.2, seconds))
        try:
            while os.read(fd, 1 << 16):
                pass
        except BlockingIOError:
            pass
