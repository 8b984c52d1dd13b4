"""Make saved deep-learning checkpoints small, keep them safe, and rotate them.

>>> import ckz
>>> with ckz.open("model.pt.ckz") as checkpoint:
...     weight = checkpoint["layers.0.weight"]

Nothing heavy is imported before it is used: ``ckz --help`` needs no numpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ckz.archive import load_state_dict, open
    from ckz.errors import CkzError
    from ckz.pipeline import compress, decompress, verify

__all__ = ["CkzError", "compress", "decompress", "load_state_dict", "open", "verify"]

_HOMES = {
    "CkzError": "ckz.errors",
    "compress": "ckz.pipeline",
    "decompress": "ckz.pipeline",
    "verify": "ckz.pipeline",
    "load_state_dict": "ckz.archive",
    "open": "ckz.archive",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'ckz' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
