"""Giving a .ckz another base, or none."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from ckz.container_read import open_container
from ckz.outputs import recorded_name
from ckz.pipeline import AnyPath, compress, decompress
from ckz.reporting import OnProgress, Report
from ckz.workers import DEFAULT_MEMORY


def rebase(
    path: AnyPath,
    *,
    base: AnyPath | None = None,
    old_base: AnyPath | None = None,
    threads: int = 0,
    memory: int = DEFAULT_MEMORY,
    progress: OnProgress | None = None,
) -> Report:
    """Write a .ckz anew, full or leaning on another base; what it restores to stays the same.

    Snapshots that lean on it still do: they know it by its contents.

    Parameters
    ----------
    base : the new base; None makes it full.
    old_base : what it leans on now, if it does not lie beside it.

    Raises
    ------
    CkzError
        In its kinds; the container is unchanged then.
    """
    path = Path(path)
    target = path.resolve()
    with (
        open_container(path) as container,
        tempfile.TemporaryDirectory(
            prefix=".ckz.", suffix=".ckz-tmp", dir=target.parent
        ) as scratch,
    ):
        source = Path(scratch) / recorded_name(container)
        decompress(path, source, base=old_base, device="cpu", threads=threads, memory=memory)
        report = compress(
            source,
            target,
            base=base,
            anchor=None if base is None else sys.maxsize,
            level=container.meta["level"],
            device="cpu",
            threads=threads,
            memory=memory,
            force=True,
            opaque=True,
            allow_incomplete=True,
            accept_bad_crc=True,
            verify=True,
            like=container,
            progress=progress,
        )
    return replace(report, source=str(path))
