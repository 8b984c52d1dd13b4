"""A thread pool that gives results in order and keeps to a memory budget."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ckz.streams import CHUNK

T = TypeVar("T")

DEFAULT_MEMORY = 160_000_000
# What one chunk in flight holds (raw bytes and payload), one thread's scratch, and the writer.
_PER_CHUNK = 2 * CHUNK
_PER_THREAD = 8 * CHUNK
_FIXED = 24 * CHUNK


class Workers(NamedTuple):
    """A pool, and how many chunks may be in flight."""

    pool: ThreadPoolExecutor
    window: int


@contextmanager
def start_workers(threads: int, memory: int) -> Iterator[Workers]:
    """Start threads (0: one a core) that together with their chunks keep to ``memory`` bytes."""
    threads = threads or len(os.sched_getaffinity(0))
    threads = max(1, min(threads, (memory - _FIXED) // (_PER_THREAD + 2 * _PER_CHUNK)))
    window = (memory - _FIXED - threads * _PER_THREAD) // _PER_CHUNK
    window = max(2, min(window, 4 * threads + 4))
    pool = ThreadPoolExecutor(threads, thread_name_prefix="ckz")
    try:
        yield Workers(pool, window)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def in_order(workers: Workers, jobs: Iterable[Callable[[], T]]) -> Iterator[T]:
    """Run jobs in the pool, at most a window ahead, and give their results in order."""
    waiting: deque[Future[T]] = deque()
    for job in jobs:
        waiting.append(workers.pool.submit(job))
        if len(waiting) >= workers.window:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def chunk_buffers(workers: Workers) -> SimpleQueue[npt.NDArray[np.uint8]]:
    """Give buffers for all chunks in flight, to be taken and put back: fresh pages are dear."""
    buffers: SimpleQueue[npt.NDArray[np.uint8]] = SimpleQueue()
    for _ in range(workers.window + 1):
        buffers.put(np.empty(CHUNK, np.uint8))
    return buffers
