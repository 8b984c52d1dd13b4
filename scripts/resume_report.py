"""Placeholder."""

from pathlib import Path


def write(kept: Path) -> None: ...
