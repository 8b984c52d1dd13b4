"""Trying again what fails for a moment, as network file systems and quotas do."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

TRANSIENT = frozenset({errno.EIO, errno.ESTALE, errno.EDQUOT, errno.EAGAIN, errno.EINTR})
# Seconds to wait before each new try.
PAUSES = (0.1, 0.5, 2.0)


def retried(act: Callable[[], T]) -> T:
    """Act, and act again after a transient failure, a few times.

    ``act`` must be one that can be repeated: a read or a write at an offset, a listing, a removal.

    Raises
    ------
    OSError
        If it fails in another way, or still.
    """
    for pause in PAUSES:
        try:
            return act()
        except OSError as err:
            if err.errno not in TRANSIENT:
                raise
            logging.getLogger("ckz").info("%s; trying again in %g s", err, pause)
            time.sleep(pause)
    return act()
