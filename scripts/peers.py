"""Install the compressors that ckz is measured against, each into its own venv under build/peers.

``ckz bench --peers`` and the scripts beside this one find them there, or where ``CKZ_PEERS`` says.
What cannot be installed is left out, with a line that says so. zstd is the system's.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from ckz.bench import tools
from ckz.errors import CkzError

TARGET = tools.rivals_directory()
# The name that ckz.peers knows -> what pip installs.
PACKAGES = {
    "lmz": ["lmzip==1.3.0"],
    "zipnn": ["zipnn==0.5.4", "torch==2.13.0"],
    "z4ai": ["z4ai==0.2.0"],
    "glyd": ["glyd==0.32.1"],
    "bigsmall": ["bigsmall==4.0.0"],
    # Every release was withdrawn by its author; pip still gives this one.
    "dmx": ["dmx-compress==1.5.3", "torch==2.13.0"],
}


def install(name: str, packages: list[str]) -> str:
    """Make one venv; give what went wrong, or nothing."""
    directory = TARGET / name
    python = directory / "bin" / "python"
    ready = directory / "ready"
    wanted = " ".join(packages)
    if ready.exists() and ready.read_text() == wanted:
        return ""
    venv.create(directory, clear=True, with_pip=True)
    command = [python, "-m", "pip", "install", "--quiet", "--prefer-binary", *packages]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        shutil.rmtree(directory)
        lines = done.stderr.strip().splitlines()
        return next((line for line in reversed(lines) if "ERROR" in line), "pip failed")
    ready.write_text(wanted)
    return ""


def check() -> None:
    """Run each once: some compile their code at first use, and that is not to be measured."""
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "model.safetensors"
        values = np.random.default_rng(0).normal(0, 0.02, (512, 512)).astype(np.float32)
        save_file({"layers.0.weight": values}, source)
        for tool in tools.find_rivals(TARGET):
            work = Path(directory) / tool.name
            work.mkdir()
            try:
                stored = tools.measure(tool, source, work, "float32").stored
                print(f"{tool.name}: works, saves {1 - stored / source.stat().st_size:.1%}")
            except CkzError as err:
                print(f"{tool.name}: fails: {err}")


def main() -> None:
    """Install all of them, or those that are named; then run them."""
    for name in sys.argv[1:] or PACKAGES:
        if name not in PACKAGES:
            sys.exit(f"{name}: not known; there are {', '.join(PACKAGES)}")
        fault = install(name, PACKAGES[name])
        print(f"{name}: {f'left out: {fault}' if fault else 'installed'}", flush=True)
    if not shutil.which("zstd"):
        print("zstd: left out: no zstd command; apt-get install zstd")
    check()


if __name__ == "__main__":
    main()
