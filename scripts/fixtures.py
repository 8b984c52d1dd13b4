"""Add fixtures to tests/fixtures/v1: files that exist are never written again.

Fixtures defend the format: what an older ckz wrote must be read, and what is broken must be
refused, by every later one. A good one is a container and the sha256 of what it restores to; the
bad and the unsupported ones are a good one with a single thing changed.
"""

from __future__ import annotations

import hashlib
import struct
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import safetensors.numpy
import torch
import xxhash

from ckz import pipeline
from ckz.container import digest_outside
from ckz.container_read import open_container

TARGET = Path(__file__).parents[1] / "tests" / "fixtures" / "v1"


def values(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.02, shape).astype(np.float32)


def make_safetensors(path: Path) -> None:
    weight = values(0, 64, 48)
    tensors = {
        "embed.weight": weight,
        "head.weight": weight.copy(),
        "half": values(1, 3000).astype(np.float16),
        "brain": values(2, 3000).astype(ml_dtypes.bfloat16),
        "tiny": values(3, 3000).astype(ml_dtypes.float8_e4m3fn),
        "double": values(4, 700).astype(np.float64),
        "complex": (values(5, 700) + 1j * values(6, 700)).astype(np.complex64),
        "steps": np.array(7, np.int64),
        "none": np.zeros((0, 3), np.float32),
        "odd \u6743/..\0name": values(7, 5),
    }
    safetensors.numpy.save_file(tensors, path)


def make_torch(path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 32))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 32)).square().mean().backward()
    optimizer.step()
    view = model[0].weight.detach()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "view": view.t()}
    torch.save(state, path)


def make_mixed(path: Path) -> None:
    rng = np.random.default_rng(9)
    master = torch.from_numpy(values(10, 96, 80))
    scale = np.exp(rng.normal(0, 4, (96, 1)) + rng.normal(0, 4, (1, 80))).astype(np.float32)
    moments = {"exp_avg_sq": torch.from_numpy(values(11, 96, 80) * scale).square()}
    optimizer = {"state": {0: {"step": torch.tensor(7.0), **moments}}, "param_groups": []}
    weight = master.bfloat16()
    torch.save({"model": {"w": weight}, "master": {"w": master}, "optimizer": optimizer}, path)


def make_directory(path: Path) -> None:
    (path / "empty").mkdir(parents=True)
    safetensors.numpy.save_file({"w": values(8, 100, 30)}, path / "model.safetensors")
    (path / "config.json").write_text('{"layers": 1}')
    (path / "latest").symlink_to("model.safetensors")


def make_nothing(path: Path) -> None:
    path.touch()


def make_text(path: Path) -> None:
    path.write_bytes(b"ckz\n" * 300_000)


SOURCES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "good-safetensors": ("model.safetensors", make_safetensors),
    "good-torch": ("model.pt", make_torch),
    "good-mixed": ("mixed.pt", make_mixed),
    "good-directory": ("good-directory", make_directory),
    "good-empty": ("empty", make_nothing),
    "good-opaque": ("text", make_text),
    "good-max": ("max.pt", make_mixed),
}
LEVELS = {"good-max": "max"}


def sealed(data: bytearray) -> bytearray:
    data[504:512] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(data[:504])))
    return data


def flip(data: bytearray, at: int) -> bytearray:
    data[at] ^= 1
    return data


def newer(data: bytearray) -> bytearray:
    data[8:12] = struct.pack("<I", 2)
    return sealed(data)


def unknown_codec(data: bytes) -> bytearray:
    """Rename a codec and give the changed bytes their digest: the name has the same length."""
    changed = bytearray(data.replace(b'"planes:dtype=float32"', b'"splines:type=float32"'))
    if changed == data:
        raise SystemExit("the codec to rename is not there")
    length = len(data)
    with tempfile.NamedTemporaryFile() as file:
        file.write(changed)
        file.flush()
        count, place = struct.unpack_from("<I", data, 12)[0], struct.unpack_from("<Q", data, 24)[0]
        extents = np.frombuffer(data, "<u8", 2 * count, place).reshape(-1, 2).tolist()
        changed[32:48] = digest_outside(file.fileno(), length, extents)
    return sealed(changed)


def payload_offset(path: Path) -> int:
    with open_container(path) as container:
        return int(container.places[0])


def changes(good: Path) -> dict[str, bytearray]:
    """Give the broken ones, made from a good one."""
    data = good.read_bytes()
    inside = payload_offset(good)
    return {
        "bad-cut": bytearray(data[:-1]),
        "bad-half": bytearray(data[: len(data) // 2]),
        "bad-stump": bytearray(data[:300]),
        "bad-longer": bytearray(data + b"\0"),
        "bad-header": flip(bytearray(data), 40),
        "bad-payload": flip(bytearray(data), inside + 20),
        "bad-index": flip(bytearray(data), len(data) - 20),
        "bad-hdf5": flip(bytearray(data), 512 + 20),
        "bad-zeroed": bytearray(data[:inside] + bytes(len(data) - inside)),
        "unsupported-version": newer(bytearray(data)),
        "unsupported-codec": unknown_codec(data),
    }


def main() -> None:
    TARGET.mkdir(parents=True, exist_ok=True)
    sums = TARGET / "SHA256SUMS"
    with tempfile.TemporaryDirectory() as scratch:
        for name, (source_name, make) in SOURCES.items():
            packed = TARGET / f"{name}.ckz"
            if packed.exists():
                continue
            source = Path(scratch) / source_name
            make(source)
            pipeline.compress(source, packed, level=LEVELS.get(name, "default"))
            files = [source, *source.rglob("*")]
            with sums.open("a") as out:
                for file in sorted(f for f in files if f.is_file() and not f.is_symlink()):
                    digest = hashlib.sha256(file.read_bytes()).hexdigest()
                    out.write(f"{digest}  {name}/{file.name}\n")
            sys.stdout.write(f"added {packed.name}\n")
    for name, data in changes(TARGET / "good-directory.ckz").items():
        path = TARGET / f"{name}.ckz"
        if not path.exists():
            path.write_bytes(data)
            sys.stdout.write(f"added {path.name}\n")


if __name__ == "__main__":
    main()
