"""Token counts of experts, given beside a checkpoint or inside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from ckz.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


def read_tokens(text: str, source: Path) -> list[list[float]]:
    """Read the tokens that each expert of each layer has seen.

    Parameters
    ----------
    text : a .npy or .json file, or the name of a tensor of the checkpoint; layers by experts. With
        a dimension of steps before these, the steps up to the checkpoint's are added up.
    source : the checkpoint.

    Raises
    ------
    UsageError
        If it is none of these, or no such counts.
    """
    import numpy as np

    from ckz.steps import step_of_name

    path = Path(text)
    try:
        if path.suffix == ".npy":
            counts = np.load(path, allow_pickle=False)
        elif path.suffix == ".json":
            counts = np.array(json.loads(path.read_text(encoding="utf-8")))
        else:
            counts = _tensor(text, source)
    except (ValueError, KeyError, EOFError) as err:
        raise UsageError(f"--token-counts {text}: {err}") from err
    if (
        not isinstance(counts, np.ndarray)
        or counts.dtype.kind not in "iuf"
        or counts.ndim not in (2, 3)
    ):
        raise UsageError(f"--token-counts {text}: needs numbers, layers by experts")
    if counts.ndim == 3:
        step = step_of_name(source.name)
        counts = (counts if step is None else counts[: step + 1]).sum(axis=0)
    if not np.isfinite(counts).all() or (counts < 0).any():
        raise UsageError(f"--token-counts {text}: counts are finite and not negative")
    found: list[list[float]] = counts.astype(float).tolist()
    return found


def _tensor(name: str, source: Path) -> npt.NDArray[np.generic]:
    from ckz.archive import Archive

    with Archive(source) as archive:
        if name not in archive:
            raise UsageError(f"--token-counts {name}: neither a .npy or .json file nor a tensor")
        return archive[name]
