"""Partial snapshots: what is not saved anew becomes what it is in the base, and costs nothing.

The restored file is complete, with parts of several ages. How old each is, is recorded, and through
a chain the age goes back to where a part was last saved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ckz.choosing import cut
from ckz.container import Carried, Ref
from ckz.errors import UsageError
from ckz.lossy.reading import Fit
from ckz.lossy.restored import Bytes, Snap
from ckz.lossy.sampling import total
from ckz.lossy.softening import soften
from ckz.lossy.units import Key, Part, Units, block_units, expert_units
from ckz.partial import Ask, Partial, by_load, by_priority, in_turn, lost_tokens, next_k
from ckz.streams import CHUNK, Extent
from ckz.values import doubles


def carry(fit: Fit, ask: Ask) -> Partial:
    """Choose what is saved, and let ``fit.files`` read the rest as it is in the base.

    Raises
    ------
    UsageError
        If experts are asked for and there are none, or other ones than were counted.
    """
    policy, before = ask.policy, ask.before
    by_expert = policy.name != "priority"
    units = expert_units(fit.checkpoint) if by_expert else block_units(fit.checkpoint)
    number = int(before.partial.get("number", 0)) + 1
    record: dict[str, Any] = {"policy": str(policy), "number": number}
    if by_expert:
        fresh = _experts(fit, units, ask, record)
    else:
        sizes = {key: sum(part.nbytes for part in parts) for key, parts in units.items()}
        moved = {key: _moved(fit, parts) for key, parts in units.items()}
        fresh = by_priority(sizes, moved, policy.value)
    soft = soften(fit, units, policy.value) if policy.name == "soft" else set()
    # A 16-bit weight follows its master.
    casts = frozenset(
        span
        for span, refs in fit.casts.items()
        if any(ref.span - len(fit.checkpoint.files) in soft for ref in refs)
    )
    coarse = soft | casts
    older: dict[int, list[Carried]] = {}
    for item in before.carried:
        older.setdefault(item.span, []).append(item)
    ranges: dict[int, list[tuple[int, int]]] = {}
    files = fit.checkpoint.files
    by_file: dict[str, int] = {}
    for key, parts in units.items():
        for part in parts:
            path = files[fit.checkpoint.spans[part.span].file].path
            by_file.setdefault(path, 0)
            saved = key in fresh or part.kind not in policy.kinds or part.span in coarse
            if saved or not _base(fit, part.span):
                by_file[path] += part.nbytes
            else:
                ranges.setdefault(part.span, []).append((part.start, part.start + part.nbytes))
    carried: list[Carried] = []
    for span, found in sorted(ranges.items()):
        joined = _joined(found)
        carried += _aged(fit, span, joined, older, before.step)
        fit.files.snaps[span] = _carrying(fit, span, joined)
    nbytes = sum(item.nbytes for item in carried)
    return Partial(record, tuple(carried), sum(by_file.values()), nbytes, by_file, casts)


def _experts(fit: Fit, units: Units, ask: Ask, record: dict[str, Any]) -> set[Key]:
    """Choose experts, and note what the next snapshot has to know."""
    policy, before, step = ask.policy, ask.before, ask.step
    layers: dict[str, int] = {}
    for layer, expert in units:
        layers[layer] = max(layers.get(layer, 0), expert + 1)
    least = int(policy.value) if policy.name == "experts" else 1
    k = least
    if ask.plt_limit is not None:
        k = max(int(before.partial.get("k", least)), least)
    seen = _counted(layers, ask.tokens)
    # Without steps on both sides snapshots are counted.
    by_step = step is not None and before.step is not None and step > before.step
    now, then = (step, before.step) if by_step else (record["number"], record["number"] - 1)
    part = float(then or 0) / float(now or 1)
    if not seen:
        seen = dict.fromkeys(units, float(now or 0))
    # A base that is whole has saved all that it had seen.
    saved = {(layer, expert): n for layer, expert, n in before.partial.get("saved", ())}
    saved = saved or {key: part * n for key, n in seen.items()}
    if policy.choice == "load":
        unsaved = {key: seen[key] - saved.get(key, 0.0) for key in units} if ask.tokens else {}
        unsaved = unsaved or {key: _moved(fit, parts) for key, parts in units.items()}
        fresh = by_load(layers, k, unsaved)
    else:
        fresh = in_turn(layers, k, record["number"])
    saved |= {key: seen.get(key, 0.0) for key in fresh}
    plt = lost_tokens(seen, saved)
    most = max(layers.values())
    record["k"] = k if ask.plt_limit is None else next_k(k, plt, ask.plt_limit, most)
    record["plt"] = plt
    record["saved"] = [[layer, expert, saved.get((layer, expert), 0.0)] for layer, expert in units]
    return fresh


def _counted(
    layers: Mapping[str, int], tokens: Sequence[Sequence[float]] | None
) -> dict[Key, float]:
    """Give the tokens that each expert has seen, layer by layer in the model's order."""
    if tokens is None:
        return {}
    counts = [len(row) for row in tokens]
    if counts != list(layers.values()):
        raise UsageError(
            f"tokens are counted for {counts} experts, the layers have {list(layers.values())}"
        )
    return {
        (layer, expert): float(n)
        for layer, row in zip(layers, tokens, strict=True)
        for expert, n in enumerate(row)
    }


def _base(fit: Fit, span: int) -> tuple[Ref, ...]:
    """Give what a span continues in the base, byte by byte; nothing if it does not."""
    lean = fit.leans.get(span)
    here = fit.checkpoint.spans[span]
    if lean is None or lean.dtype != here.dtype or here.packed or not lean.certain:
        return ()
    return lean.refs if sum(ref.nbytes for ref in lean.refs) == here.nbytes else ()


def _moved(fit: Fit, parts: Sequence[Part]) -> float:
    """Give the squared norm of how far a unit's weights are from those in the base."""
    if all(part.kind != "W" for part in parts):
        return float("inf")
    moved = 0.0
    for part in parts:
        refs = _base(fit, part.span)
        if part.kind != "W":
            continue
        if not refs:
            return float("inf")
        span = fit.checkpoint.spans[part.span]
        for at in range(part.start, part.start + part.nbytes, CHUNK):
            now = np.empty(min(CHUNK, part.start + part.nbytes - at), np.uint8)
            fit.files.read_original([Extent(span.file, span.offset + at, now.size)], now)
            was = np.concatenate([fit.read_ref(ref) for ref in cut(refs, at, at + now.size)])
            with np.errstate(all="ignore"):
                far = doubles(now, span.dtype) - doubles(was, span.dtype)
                moved += total(np.where(np.isfinite(far), far, 0) ** 2)
    return moved


def _joined(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sort ranges, and join neighbours."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], stop
        else:
            found.append((start, stop))
    return found


def _aged(
    fit: Fit,
    span: int,
    ranges: Sequence[tuple[int, int]],
    carried: Mapping[int, Sequence[Carried]],
    step: int | None,
) -> list[Carried]:
    """Say how old carried ranges are, which the base may carry itself."""
    found = []
    for start, stop in ranges:
        for ref in cut(_base(fit, span), start, stop):
            older = [
                (max(c.start, ref.start), min(c.start + c.nbytes, ref.start + ref.nbytes), c)
                for c in carried.get(ref.span, ())
            ]
            at = ref.start
            pieces = []
            for low, high, item in sorted(p for p in older if p[0] < p[1]):
                pieces.append((at, low, 1, step))
                pieces.append((low, high, item.age + 1, item.step))
                at = high
            pieces.append((at, ref.start + ref.nbytes, 1, step))
            for low, high, age, saved in pieces:
                if low < high:
                    place = start + low - ref.start
                    found.append(Carried(span, place, high - low, age, saved))
            start += ref.nbytes
    return found


def _carrying(fit: Fit, span: int, ranges: Sequence[tuple[int, int]]) -> Snap:
    """Replace ranges of a span by what they are in the base, behind what else is done to it."""
    old = fit.files.snaps.get(span)
    whole = ranges == [(0, fit.checkpoint.spans[span].nbytes)]
    method = "carried" if whole or old is None else f"{old.method}, some carried"
    candidate = None if whole or old is None else old.candidate
    if candidate is not None:
        candidate = candidate._replace(carried=True)
    return Snap(partial(_replace, fit, _base(fit, span), old, ranges), method, candidate)


def _replace(
    fit: Fit,
    refs: tuple[Ref, ...],
    old: Snap | None,
    ranges: Sequence[tuple[int, int]],
    chunk: Bytes,
    at: int,
) -> None:
    if old is not None:
        old.replace(chunk, at)
    for start, stop in ranges:
        low, high = max(start, at), min(stop, at + chunk.size)
        if low < high:
            parts = [fit.read_ref(ref) for ref in cut(refs, low, high)]
            chunk[low - at : high - at] = np.concatenate(parts)
