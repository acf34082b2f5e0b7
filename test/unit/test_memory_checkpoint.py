"""A memory's file: what it keeps, and every way it can be wrong."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch_file

from aura_ros.errors import UserError
from aura_ros.memory import (
    MemoryConfig,
    MemoryModule,
    NumpyMemory,
    build_untrained,
    export_numpy,
    load_checkpoint,
    load_module,
    save_checkpoint,
)
from aura_ros.memory.checkpoint import content_hash

CONFIG = MemoryConfig(input_dim=20, out_dim=6, dk=8, dv=8)


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def path(tmp_path):
    build_untrained(CONFIG, tmp_path / "memory.safetensors")
    return tmp_path / "memory.safetensors"


def metadata_of(path) -> dict[str, str]:
    with safe_open(path, framework="numpy") as file:
        return dict(file.metadata())


def refusal_of(path) -> str:
    with pytest.raises(UserError) as refusal:
        NumpyMemory.load(path)
    message = str(refusal.value)
    assert "\n" not in message
    assert str(path) in message
    return message


def test_numpy_memory_loads_and_steps_in_a_process_without_torch(path):
    code = (
        "import sys, numpy as np; from aura_ros.memory import NumpyMemory; "
        f"m = NumpyMemory.load({str(path)!r}); m.step(np.ones(20, np.float32)); "
        "print(m.steps, sorted({'torch', 'rclpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1 []"


def test_whoever_may_read_other_files_of_its_owner_may_read_it(path):
    # A node may run as a user of its own.
    (other := path.parent / "other").touch()
    assert path.stat().st_mode == other.stat().st_mode


def test_same_seed_same_hash(tmp_path):
    one = build_untrained(CONFIG, tmp_path / "one")
    two = build_untrained(CONFIG, tmp_path / "two")
    assert one.weights_hash == two.weights_hash == load_checkpoint(tmp_path / "two").weights_hash
    assert (
        build_untrained(MemoryConfig(input_dim=20, out_dim=6, dk=8, dv=8, seed=1)).weights_hash
        != one.weights_hash
    )


def test_the_hash_is_the_same_from_module_file_and_arrays(tmp_path):
    module = MemoryModule(CONFIG)
    stated = export_numpy(module, tmp_path / "memory")
    checkpoint = load_checkpoint(tmp_path / "memory")
    assert stated == checkpoint.weights_hash == build_untrained(CONFIG).weights_hash
    assert NumpyMemory.load(tmp_path / "memory").weights_hash == stated
    assert NumpyMemory.from_arrays(CONFIG, checkpoint.arrays).weights_hash == stated
    assert len(stated) == 64


def test_the_hash_covers_names_shapes_bytes_and_configuration():
    arrays = {"a": np.zeros((2, 3), np.float32), "b": np.ones(2, np.float32)}
    variants = [
        ("{}", arrays),
        ("{ }", arrays),
        ("{}", {"a": arrays["a"], "c": arrays["b"]}),
        ("{}", arrays | {"a": np.zeros((3, 2), np.float32)}),
        ("{}", arrays | {"b": np.array([1, 1.0000001], np.float32)}),
        ("{}", arrays | {"b": np.array([1, -0.0], np.float32)}),
    ]
    assert len({content_hash(text, given) for text, given in variants}) == len(variants)
    assert content_hash("{}", dict(reversed(arrays.items()))) == content_hash("{}", arrays)


def test_module_comes_back_bit_for_bit_with_its_statistics(tmp_path):
    module = MemoryModule(CONFIG)
    torch.manual_seed(0)
    module.train()(torch.randn(4, 5, 20))
    export_numpy(module, tmp_path / "memory")
    again = load_module(tmp_path / "memory")
    assert again.config == CONFIG
    assert not again.training
    assert float(again.surprise_ready) == 1.0
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


def test_a_float64_module_exports_as_float32(tmp_path):
    export_numpy(MemoryModule(CONFIG).double(), tmp_path / "memory")
    assert NumpyMemory.load(tmp_path / "memory").state_dict()["fast_weights"].dtype == np.float32


def test_export_replaces_the_file_as_a_whole_and_leaves_no_others(path, monkeypatch):
    before = path.read_bytes()

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(UserError, match="disk full"):
        export_numpy(MemoryModule(CONFIG), path)
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    export_numpy(MemoryModule(MemoryConfig(input_dim=20, out_dim=6, dk=8, dv=8, seed=9)), path)
    assert path.read_bytes() != before
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_export_into_a_missing_folder_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match="nowhere"):
        export_numpy(MemoryModule(CONFIG), tmp_path / "nowhere" / "memory")


def test_a_diverged_module_is_not_exported(tmp_path):
    module = MemoryModule(CONFIG)
    with torch.no_grad():
        module.to_q.weight[0, 0] = float("nan")
    with pytest.raises(UserError, match=r"to_q\.weight"):
        export_numpy(module, tmp_path / "memory")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("where", [0.0, 0.3, 0.6, 0.999])
def test_any_damaged_byte_is_found(path, where):
    data = bytearray(path.read_bytes())
    data[int(where * len(data))] ^= 0x10
    path.write_bytes(bytes(data))
    refusal_of(path)


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, -1])
def test_a_truncated_file_is_refused(path, keep):
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data))] if isinstance(keep, float) else data[:keep])
    refusal_of(path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    refusal_of(tmp_path / "absent.safetensors")
    refusal_of(tmp_path)


def test_a_git_lfs_pointer_is_named_as_such(tmp_path):
    pointer = tmp_path / "memory.safetensors"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    assert "git lfs pull" in refusal_of(pointer)


def test_a_foreign_safetensors_file_is_refused(tmp_path):
    save_file({"x": np.zeros(3, np.float32)}, tmp_path / "other")
    assert "format" in refusal_of(tmp_path / "other")


def test_a_changed_configuration_is_found(path):
    checkpoint, metadata = load_checkpoint(path), metadata_of(path)
    changed = json.loads(metadata["config"]) | {"threshold": 0.1}
    save_file(checkpoint.arrays, path, metadata | {"config": json.dumps(changed, sort_keys=True)})
    assert "altered" in refusal_of(path)


def rewritten(path, **changes):
    """Write the file anew with other arrays and a hash that fits them."""
    checkpoint = load_checkpoint(path)
    arrays = {k: v for k, v in (checkpoint.arrays | changes).items() if v is not None}
    metadata = metadata_of(path)
    save_file(arrays, path, metadata | {"sha256": content_hash(metadata["config"], arrays)})


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("to_q.weight", None),
        ("surplus", np.zeros(2, np.float32)),
        ("to_q.weight", np.zeros((8, 63), np.float32)),
        ("to_q.weight", np.zeros((8, 64), np.float64)),
        ("to_q.weight", np.full((8, 64), np.inf, np.float32)),
        ("surprise_variance", np.array(np.nan, np.float32)),
    ],
)
def test_arrays_that_do_not_fit_are_refused_even_with_a_fitting_hash(path, name, array):
    rewritten(path, **{name: array})
    assert name in refusal_of(path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int64])
@pytest.mark.filterwarnings("error")
def test_a_dtype_numpy_lacks_is_refused_by_name(path, dtype):
    arrays = {name: torch.from_numpy(array) for name, array in load_checkpoint(path).arrays.items()}
    save_torch_file(arrays | {"to_k.weight": torch.ones(8, 64).to(dtype)}, path, metadata_of(path))
    assert "to_k.weight" in refusal_of(path)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("name", "value"), [("eta_raw", 1000.0), ("eta_raw", 89.0), ("surprise_variance", -1.0)]
)
def test_scalars_that_make_no_memory_are_refused(path, name, value):
    rewritten(path, **{name: np.array(value, np.float32)})
    with pytest.raises(UserError, match=name):
        NumpyMemory.load(path)


@pytest.mark.filterwarnings("error")
def test_weights_that_overflow_when_folded_are_refused(path):
    rewritten(
        path,
        **{
            "encoder.2.weight": np.full((64, 64), 1e30, np.float32),
            "to_q.weight": np.full((8, 64), 1e30, np.float32),
        },
    )
    with pytest.raises(UserError, match="overflow"):
        NumpyMemory.load(path)


def test_extreme_but_finite_decay_loads(path):
    rewritten(path, alpha_raw=np.array(1000.0, np.float32))
    memory = NumpyMemory.load(path)
    for _ in range(3):
        memory.step(np.ones(20, np.float32), force=True)
    assert np.isfinite(memory.state_norm)


def test_save_refuses_arrays_of_another_configuration(tmp_path):
    arrays = build_untrained(CONFIG).arrays
    with pytest.raises(UserError, match=r"head\.action\.4"):
        save_checkpoint(tmp_path / "memory", MemoryConfig(input_dim=20, out_dim=7, dk=8, dv=8), arrays)


def test_the_period_the_memory_was_trained_at_is_kept(tmp_path):
    build_untrained(MemoryConfig(input_dim=20, out_dim=6, memory_step_period=8), tmp_path / "memory")
    assert NumpyMemory.load(tmp_path / "memory").config.memory_step_period == 8
