"""Checkpoints that the frameworks themselves write, of the versions that `make test-formats` takes.

Each goes through the whole of ckz and comes back as it was, and each tensor that the framework
finds in it is found by ckz, with its dtype, shape, role and values.
"""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import ckz
from ckz.checkpoint import Checkpoint
from ckz.roles import match_optimizer

pytestmark = [pytest.mark.formats, pytest.mark.filterwarnings("ignore")]  # the frameworks' own

# Role and value of each tensor, by the name that ckz gives it.
Expected = dict[str, tuple[str, Any]]

SLOTS = {"exp_avg": "momentum", "exp_avg_sq": "variance", "max_exp_avg_sq": "variance"}


def tree(root: Path) -> dict[str, tuple[int, int, bytes]]:
    """Give mode, time, and bytes or link of a file, or of all that lies in a directory."""
    found = {}
    for path in [root] if root.is_file() else sorted(root.rglob("*")):
        info = path.lstat()
        if path.is_symlink():
            content = os.fsencode(path.readlink())
        else:
            content = b"" if path.is_dir() else path.read_bytes()
        name = "" if path == root else str(path.relative_to(root))
        found[name] = info.st_mode, info.st_mtime_ns, content
    return found


def bits(value: Any) -> tuple[str, tuple[int, ...], bytes]:
    """Give dtype, shape and bytes of a torch tensor or an array."""
    if isinstance(value, np.ndarray):
        return value.dtype.name, value.shape, value.tobytes()
    value = value.detach().contiguous()
    data = value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
    return str(value.dtype).removeprefix("torch."), tuple(value.shape), data


# Where a torch zip file has a storage; with the lengths of its name and of what precedes the data.
STORAGE = re.compile(rb"PK\x03\x04.{22}(.{4})[^/]+/data/\d+", re.DOTALL)
NEXT = (b"PK\x07\x08", b"PK\x03\x04")  # follows at once where a storage is empty


def storages(data: bytes) -> Iterator[int]:
    """Give where storages begin in the torch zip files that lie in ``data``; no empty ones."""
    for header in STORAGE.finditer(data):
        at = header.start() + 30 + sum(struct.unpack("<HH", header[1]))
        if not data.startswith(NEXT, at):
            yield at


def check(source: Path, format: str, expected: Expected) -> Checkpoint:
    """Compress and restore a checkpoint, and hold its tensors against those expected."""
    for number, path in enumerate(reversed(sorted(source.rglob("*")) or [source])):
        if not path.is_symlink():
            path.chmod((0o640 if number % 2 else 0o604) | 0o100 * path.is_dir())
        os.utime(path, ns=(10**18 + number, 10**18 + number), follow_symlinks=False)
    before = tree(source)
    packed = source.with_name(f"{source.name}.ckz")
    back = source.with_name(f"back-{source.name}")
    ckz.verify(source)
    ckz.compress(source, packed)
    ckz.verify(packed, data=True)
    ckz.decompress(packed, back)
    assert tree(back) == before
    assert tree(source) == before
    with ckz.open(source) as archive:
        checkpoint = archive.checkpoint
    assert (checkpoint.format, checkpoint.missing) == (format, ())
    spans = {(span.file, span.offset) for span in checkpoint.spans}
    for number, file in enumerate(checkpoint.files):
        if file.kind == "file":
            assert {
                (number, at) for at in storages(checkpoint.path_of(number).read_bytes())
            } <= spans
    for path in source, packed:
        with ckz.open(path) as archive:
            assert sorted(archive) == sorted(expected)
            for name, (role, value) in expected.items():
                info = archive.info(name)
                dtype, shape, data = bits(value)
                assert (info.dtype, info.shape, info.role) == (dtype, shape, role), name
                assert archive[name].tobytes() == data, name
    return checkpoint


def leaves(value: Any, *path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Name the tensors of what ``torch.load`` gives; parts of subclasses as attributes."""
    if hasattr(value, "__tensor_flatten__"):
        for part in value.__tensor_flatten__()[0]:
            yield ".".join((*path, part)), getattr(value, part)
    elif isinstance(value, torch.Tensor):
        yield ".".join(path), value
    elif isinstance(value, Mapping):
        for key, child in value.items():
            yield from leaves(child, *path, str(key))
    elif isinstance(value, list | tuple):
        for index, child in enumerate(value):
            yield from leaves(child, *path, str(index))


def loaded(path: Path, **roles: str) -> Expected:
    """Give what torch loads from a file; roles by the first part of the name."""
    expected = {}
    for name, value in leaves(torch.load(path, weights_only=False)):
        first, last = name.partition(".")[0], name.rpartition(".")[2]
        role = roles.get(first, SLOTS.get(last, "other"))
        expected[name] = role if value.ndim and value.is_floating_point() else "other", value
    return expected


def of_file(path: str, expected: Expected) -> Expected:
    return {f"{path}:{name}": value for name, value in expected.items()}


def weights(named: Iterable[tuple[str, torch.Tensor]]) -> Expected:
    return {name: ("weight", value) for name, value in named}


def gpt2() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 64, "n_positions": 16}
    ends = {"bos_token_id": 0, "eos_token_id": 1}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **ends))


def untied(model: Any) -> Expected:
    """Give a model's weights as ``save_pretrained`` does: tied ones once."""
    return weights(item for item in model.state_dict().items() if item[0] != "lm_head.weight")


def test_transformers_trainer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "run"),
        max_steps=4,
        save_steps=2,
        per_device_train_batch_size=2,
        weight_decay=0.1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    text = torch.arange(8)
    data = [{"input_ids": text + n, "labels": text + n} for n in range(16)]
    transformers.Trainer(model=gpt2(), args=arguments, train_dataset=data).train()
    root = tmp_path / "run" / "checkpoint-4"
    model = transformers.GPT2LMHeadModel.from_pretrained(root)
    checkpoint = check(
        root,
        "hf-trainer",
        {
            **of_file("model.safetensors", untied(model)),
            **of_file("optimizer.pt", loaded(root / "optimizer.pt")),
            **of_file("rng_state.pth", loaded(root / "rng_state.pth")),
        },
    )
    assert {"scheduler.pt", "training_args.bin"} < {file.path for file in checkpoint.files}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_shards(tmp_path: Path, dtype: torch.dtype) -> None:
    root = tmp_path / "model"
    model = gpt2().to(dtype)
    model.save_pretrained(root, max_shard_size="30KB")
    assert len(list(root.glob("*.safetensors"))) > 1
    again = type(model).from_pretrained(root, dtype=dtype)
    check(root, "hf-sharded", untied(again))


def test_a_whole_module(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save(gpt2(), path)
    model = torch.load(path, weights_only=False)
    expected = weights(model.named_parameters(remove_duplicate=False))
    assert {"transformer.wte.weight", "lm_head.weight"} < expected.keys()  # one tensor
    check(path, "torch", expected)


def test_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self, width: int = 6) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.BatchNorm1d(width))

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = self.net(batch[0]).square().mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), amsgrad=True)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    root = tmp_path / "checkpoints"
    saving = lightning.pytorch.callbacks.ModelCheckpoint(
        root, save_last="link", save_top_k=-1, monitor="loss"
    )
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", callbacks=[saving], **quiet)
    data = torch.utils.data.TensorDataset(torch.randn(16, 8))
    trainer.fit(Module(), torch.utils.data.DataLoader(data, batch_size=4))
    assert (root / "last.ckpt").is_symlink()
    expected = {}
    for path in root.glob("epoch=*.ckpt"):
        tensors = loaded(path, state_dict="weight")
        for name in "running_mean", "running_var":
            name = f"state_dict.net.1.{name}"
            tensors[name] = "other", tensors[name][1]
        expected |= of_file(path.name, tensors)
    checkpoint = check(root, "directory", expected)
    order = [name for name, _ in Module().named_parameters()]
    for path in root.glob("epoch=*.ckpt"):
        tensors = [t for t in checkpoint.tensors if t.name.startswith(f"{path.name}:")]
        state = f"{path.name}:optimizer_states.0.state"
        assert match_optimizer(tensors) == {
            f"{state}.{number}.{slot}": f"{path.name}:state_dict.{name}"
            for number, name in enumerate(order)
            for slot in SLOTS
        }


@pytest.fixture
def keras(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "home"))
    return pytest.importorskip("keras")


def keras_model(keras: ModuleType, dtype: str) -> Any:
    """Make a model whose layers are called as their files call them."""
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(6, name="dense"),
            keras.layers.BatchNormalization(name="batch_normalization"),
            keras.layers.Dense(3, name="dense_1", dtype=dtype),
        ]
    )
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss=keras.losses.MeanSquaredError())
    return model


def trained(keras: ModuleType, dtype: str) -> Any:
    keras.utils.set_random_seed(0)
    model = keras_model(keras, dtype)
    inputs, targets = np.random.rand(16, 8), np.random.rand(16, 3)
    model.fit(inputs.astype("f4"), targets.astype("f4"), epochs=2, batch_size=8, verbose=0)
    return model


def keras_expected(model: Any, name: Callable[[Any, int, Any], str]) -> Expected:
    """Give a model's variables by a function of owner, number and variable."""
    expected = {
        name(layer, number, variable): ("weight" if variable.trainable else "other", variable)
        for layer in model.layers
        for number, variable in enumerate(layer.weights)
    }
    ends = {"momentum": "momentum", "velocity": "variance"}
    for number, variable in enumerate(model.optimizer.variables):
        role = ends.get(variable.path.rpartition("_")[2], "other")
        expected[name(None, number, variable)] = role, variable
    assert len(expected) == 8 + 2 + 12
    return {name: (role, variable.value) for name, (role, variable) in expected.items()}


def numbered(layer: Any, number: int, variable: Any) -> str:
    return f"layers/{layer.name}/vars/{number}" if layer else f"optimizer/vars/{number}"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_keras(tmp_path: Path, keras: ModuleType, dtype: str) -> None:
    path = tmp_path / "model.keras"
    trained(keras, dtype).save(path)
    check(path, "keras", keras_expected(keras.saving.load_model(path), numbered))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_keras_weights(tmp_path: Path, keras: ModuleType, dtype: str) -> None:
    path = tmp_path / "model.weights.h5"
    model = trained(keras, dtype)
    model.save_weights(path)
    again = keras_model(keras, dtype)
    again.optimizer.build(again.trainable_variables)
    again.load_weights(path)
    check(path, "hdf5", keras_expected(again, numbered))


def test_keras_legacy(tmp_path: Path, keras: ModuleType) -> None:
    path = tmp_path / "model.h5"
    model = trained(keras, "float32")
    model.save(path)

    def named(layer: Any, number: int, variable: Any) -> str:
        owner = f"model_weights/{layer.name}" if layer else "optimizer_weights"
        return f"{owner}/{variable.path}"

    # The model that was saved: Keras itself loses the optimizer when it loads this format.
    check(path, "hdf5", keras_expected(model, named))


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_torchao(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    optim = pytest.importorskip("torchao.optim")
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # that takes minutes
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 4))
    optimizer = getattr(optim, name)(model.parameters())
    for _ in range(2):
        model(torch.randn(4, 64)).square().sum().backward()
        optimizer.step()
    path = tmp_path / "state.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    expected = loaded(path, model="weight")
    assert "optimizer.state.0.exp_avg.codes" in expected
    check(path, "torch", expected)


def test_gguf(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    kinds = gguf.GGMLQuantizationType
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_token_list(["<s>", "a", "b"])
    rng = np.random.default_rng(0)
    for kind in kinds.F32, kinds.F16, kinds.BF16, kinds.Q8_0, kinds.Q4_0:
        values = gguf.quants.quantize(rng.normal(size=(6, 64)).astype(np.float32), kind)
        writer.add_tensor(f"blk.{kind}.attn_q.weight", values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expected = {}
    for tensor in gguf.GGUFReader(path).tensors:
        data = np.array(tensor.data)
        if tensor.tensor_type == kinds.BF16:  # which the reader gives as bytes
            data = data.view(ml_dtypes.bfloat16)
        expected[tensor.name] = "other" if data.dtype == np.uint8 else "weight", data
    assert len(expected) == 5
    check(path, "gguf", expected)


def network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 33))


def on_ranks(function: Callable[..., None], world: int, *arguments: Any) -> None:
    """Run a function of this module in processes that talk to each other."""
    torch.multiprocessing.spawn(function, (world, *arguments), nprocs=world)


def join_ranks(rank: int, world: int, root: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(root / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)


def save_sharded(rank: int, world: int, root: Path) -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    join_ranks(rank, world, root)
    model = network()
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 7)).sum().backward()
    optimizer.step()
    state, slots = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optim": slots, "step": 3}, checkpoint_id=root / "saved")
    dist.destroy_process_group()


def test_distributed_checkpoint(tmp_path: Path) -> None:
    on_ranks(save_sharded, 2, tmp_path)
    root = tmp_path / "saved"
    assert len(list(root.glob("*.distcp"))) == 2
    dcp_to_torch_save(root, tmp_path / "whole.pt")
    expected = loaded(tmp_path / "whole.pt", model="weight")
    checkpoint = check(root, "dcp", expected)
    assert max(len(tensor.pieces) for tensor in checkpoint.tensors) == 2


def save_zero(rank: int, world: int, root: Path, stage: int) -> None:
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(rank)}
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first
    join_ranks(rank, world, root)
    model = network()
    vectors = [p for p in model.parameters() if p.ndim < 2]
    matrices = [p for p in model.parameters() if p.ndim > 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(groups),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "bf16": {"enabled": stage > 0},
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage},
        },
    )
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 7, dtype=next(model.parameters()).dtype)).sum())
        engine.step()
    engine.save_checkpoint(root / "saved", tag="step")
    dist.destroy_process_group()


@pytest.mark.parametrize(("stage", "world"), [(0, 1), (1, 2), (2, 2), (3, 1), (3, 2)])
def test_deepspeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int, world: int) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    pytest.importorskip("deepspeed")
    on_ranks(save_zero, world, tmp_path, stage)
    root = tmp_path / "saved"
    expected: Expected = {}
    files = list(root.glob("step/*.pt"))
    for path in files:
        tensors = loaded(path, module="weight")
        for name, (_, value) in tensors.items():
            if "fp32" in name:
                tensors[name] = "master", value
        several = len(files) > 1
        expected |= of_file(f"step/{path.name}", tensors) if several else tensors
    if stage:
        expected |= zero_parameters(root, tmp_path / "universal")
    assert any(role == "momentum" for role, _ in expected.values())
    check(root, "deepspeed", expected)


def zero_parameters(root: Path, universal: Path) -> Expected:
    """Give the parameters in the partitions as DeepSpeed's own tools put them together."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    module = "deepspeed.checkpoint.ds_to_universal"
    flags = ["--num_extract_workers", "1", "--num_merge_workers", "1", "--inject_missing_state"]
    places = ["--input_folder", str(root / "step"), "--output_folder", str(universal)]
    subprocess.run([sys.executable, "-m", module, *places, *flags], check=True)
    expected: Expected = {}
    for name, value in get_fp32_state_dict_from_zero_checkpoint(str(root)).items():
        expected[f"step:zero.{name}.fp32"] = "master", value
        for slot in "exp_avg", "exp_avg_sq":
            merged = torch.load(universal / "zero" / name / f"{slot}.pt", weights_only=False)
            merged = merged["param"] if isinstance(merged, dict) else merged
            expected[f"step:zero.{name}.{slot}"] = SLOTS[slot], merged.reshape(value.shape)
    assert len(expected) == 3 * 6
    return expected
