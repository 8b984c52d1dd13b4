"""Arrays that are made once while they are wanted, for threads that want the same ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


class _Entry:
    def __init__(self) -> None:
        self.lock = Lock()
        self.value: Bytes | None = None


class Cache:
    """Makes arrays by number, and keeps those used last.

    Two threads that want the same one at once do not both make it.
    """

    def __init__(self, make: Callable[[int], Bytes], nbytes: int) -> None:
        """Keep as many of what ``make`` gives as have ``nbytes`` together, but at least one."""
        self._make = make
        self._room = nbytes
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self._lock = Lock()

    def __call__(self, number: int) -> Bytes:
        """Give the array of a number."""
        with self._lock:
            entry = self._entries.setdefault(number, _Entry())
            self._entries.move_to_end(number)
        with entry.lock:
            if entry.value is not None:
                return entry.value
            value = entry.value = self._make(number)
        with self._lock:
            self._room -= value.nbytes
            while self._room < 0 and len(self._entries) > 1:
                oldest = next(iter(self._entries))
                if (gone := self._entries[oldest].value) is None:
                    break  # is being made
                self._room += gone.nbytes
                del self._entries[oldest]
        return value
