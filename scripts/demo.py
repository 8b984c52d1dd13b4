"""The main job on a real checkpoint: train, save, compress, look, verify, restore, compare.

A small transformer learns, for some seconds and with AdamW, the Python that comes with this Python.
Its training state and its weights in bfloat16 are saved by ``torch.save`` under ``build/demo``.
"""

from __future__ import annotations

import hashlib
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

STEPS = 60
SAVES = (50, 59, 60)
BATCH, CONTEXT, WIDTH, LAYERS, HEADS = 16, 64, 256, 4, 4
VOCABULARY = 256  # bytes

DIRECTORY = Path("build/demo")
CKZ = Path(sys.executable).with_name("ckz")


class Model(nn.Module):
    """A causal transformer over bytes whose output head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(LAYERS)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.place.weight
        for layer in self.layers:
            x = layer(x, src_mask=self.mask, is_causal=True)
        return self.head(self.norm(x))


def train() -> Iterator[tuple[int, dict[str, object]]]:
    """Train on the standard library's sources; give the training state when it is to be saved."""
    torch.manual_seed(0)
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(
        bytearray(b"".join(path.read_bytes() for path in sources)), dtype=torch.uint8
    ).long()
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    started = time.monotonic()
    for step in range(1, STEPS + 1):
        starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,))
        batch = torch.stack([text[at : at + CONTEXT + 1] for at in starts.tolist()])
        logits = model(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if step == 1 or step % 10 == 0:
            print(f"step {step:3}  loss {loss.item():.3f}  {time.monotonic() - started:4.1f} s")
        if step in SAVES:
            yield (
                step,
                {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "scheduler": scheduler.state_dict(),
                    "rng": torch.get_rng_state(),
                    "step": step,
                },
            )


def ckz(*arguments: str) -> None:
    """Run the command as a user would."""
    print(f"\n$ ckz {shlex.join(arguments)}", flush=True)
    subprocess.run([CKZ, *arguments], cwd=DIRECTORY, check=True)


def sha256(path: Path) -> str:
    """Hash a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> None:
    """Run the demonstration; exit with 1 if a byte differs."""
    shutil.rmtree(DIRECTORY, ignore_errors=True)
    (DIRECTORY / "restored").mkdir(parents=True)
    for step, state in train():
        torch.save(state, DIRECTORY / f"step_{step}.pt")
    weights = {name: value.bfloat16() for name, value in state["model"].items()}
    torch.save(weights, DIRECTORY / "weights_bf16.pt")
    saved = ["step_50.pt", "weights_bf16.pt", "step_59.pt", "step_60.pt"]

    ckz("compress", *saved[:2])
    ckz("inspect", "step_50.pt.ckz")
    ckz("compress", "step_59.pt", "--base", "step_50.pt.ckz")
    ckz("compress", "step_60.pt", "--base", "step_59.pt.ckz")
    ckz("verify", "--data", *(f"{name}.ckz" for name in saved))
    ckz("decompress", "-o", "restored", *(f"{name}.ckz" for name in saved))

    print()
    for name in saved:
        before, after = sha256(DIRECTORY / name), sha256(DIRECTORY / "restored" / name)
        raw = (DIRECTORY / name).stat().st_size
        stored = (DIRECTORY / f"{name}.ckz").stat().st_size
        print(f"{name}: {raw:,} -> {stored:,} bytes, {raw / stored:.2f}x")
        print(f"  sha256 {before} saved\n  sha256 {after} restored")
        if before != after:
            sys.exit("the restored file is not the saved one")
    print("the restored files are the saved ones, byte for byte")


if __name__ == "__main__":
    main()
