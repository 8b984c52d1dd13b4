"""Directories that the Trainer of Hugging Face transformers writes: ``checkpoint-500/``.

A model of any kind, ``trainer_state.json``, and for going on ``optimizer.pt``, ``scheduler.pt`` and
a random state for each rank. DeepSpeed and torch's distributed checkpoints have folders of their
own in there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from ckz.formats.layout import Directory
from ckz.formats.ranks import fault, folder_and_name, lost

_STATE = "trainer_state.json"
_MODEL = re.compile(r"(pytorch_model|model|adapter_model|adapter)([-.].*)?\.(bin|safetensors)")
_TORCH = re.compile(r"(optimizer|scheduler|scaler|rng_state(_\d+)?|training_args)\.(pt|pth|bin)")
# Where others than the Trainer keep the model.
_FOLDERS = re.compile(r"(pytorch_model_fsdp_\d+|global_step\d+|checkpoint-\d+)")


def arrange(found: Directory) -> Directory:
    """Recognise the Trainer's directories, and say what they lack."""
    folders: dict[str, dict[str, int]] = {}
    for place, file in enumerate(found.files):
        folder, name = folder_and_name(file.path)
        folders.setdefault(folder, {})[name] = place
    saved = [entries for entries in folders.values() if _STATE in entries]
    if not saved:
        return found
    missing = [line for entries in saved for line in _missing(found, entries)]
    return found._replace(format="hf-trainer", missing=(*found.missing, *missing))


def _missing(found: Directory, entries: Mapping[str, int]) -> Iterator[str]:
    """Say what one of them lacks."""
    state = found.files[entries[_STATE]]
    if reason := lost(found, entries[_STATE]):
        yield f"{state.path!r} {reason}"
    for name, place in entries.items():
        model = _MODEL.fullmatch(name)
        if (model or _TORCH.fullmatch(name)) and (reason := fault(found, place)):
            yield f"{found.files[place].path!r} {reason}"
    held = [name for name in entries if _MODEL.fullmatch(name) or _FOLDERS.fullmatch(name)]
    if not held and not any(name.endswith(".index.json") for name in entries):
        yield f"{state.path!r} has no model beside it"
