"""A memory's state survives a restart as a file bound to its weights."""

import json
import os

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from aura_ros.errors import UserError
from aura_ros.memory import MemoryConfig, NumpyMemory, build_untrained
from aura_ros.memory.state_file import load_state, save_state


def memory(seed=0):
    config = MemoryConfig(input_dim=16, out_dim=4, input_kind="projection", residual=True, seed=seed)
    return NumpyMemory.from_checkpoint(build_untrained(config))


@pytest.fixture
def stepped():
    remembered = memory()
    rng = np.random.default_rng(3)
    for _ in range(5):
        remembered.step(rng.standard_normal(16, dtype=np.float32), force=True)
    return remembered


def test_a_loaded_state_goes_on_exactly_where_the_saved_one_was(tmp_path, stepped):
    save_state(stepped, tmp_path / "state.safetensors", epoch=7)
    restored = memory()
    load_state(restored, tmp_path / "state.safetensors")
    x = np.random.default_rng(4).standard_normal(16, dtype=np.float32)
    a, b = stepped.step(x), restored.step(x)
    assert (a.probability, a.surprise, a.fired) == (b.probability, b.surprise, b.fired)
    assert stepped.state_dict()["fast_weights"].tobytes() == restored.state_dict()["fast_weights"].tobytes()
    assert (restored.steps, restored.writes) == (stepped.steps, stepped.writes)


def test_a_state_of_other_weights_is_refused_and_names_both(tmp_path, stepped):
    save_state(stepped, tmp_path / "state.safetensors", epoch=7)
    other = memory(seed=1)
    before = other.state_dict()["fast_weights"].tobytes()
    with pytest.raises(UserError, match=f"{stepped.weights_hash[:12]}.*{other.weights_hash[:12]}"):
        load_state(other, tmp_path / "state.safetensors")
    assert other.state_dict()["fast_weights"].tobytes() == before


@pytest.mark.parametrize("damage", ["missing", "cut", "foreign"])
def test_a_broken_file_is_one_line_and_leaves_the_memory_alone(tmp_path, stepped, damage):
    path = tmp_path / "state.safetensors"
    save_state(stepped, path, epoch=7)
    if damage == "missing":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:100])
    else:
        path.write_bytes(b"hello")
    before = stepped.state_dict()["fast_weights"].tobytes()
    with pytest.raises(UserError, match="memory state") as refused:
        load_state(stepped, path)
    assert "\n" not in str(refused.value)
    assert stepped.state_dict()["fast_weights"].tobytes() == before


def one_line(refused) -> str:
    text = str(refused.value)
    assert "\n" not in text
    assert "\0" not in text
    return text


@pytest.mark.parametrize(
    "path",
    ["", ".", "..", "/", "missing/state.safetensors", "file/state.safetensors", "a" * 256, "a\0b", "folder"],
    ids=["empty", "dot", "dots", "root", "missing", "in a file", "too long", "nul", "folder"],
)
def test_a_path_that_cannot_be_used_is_one_line_and_leaves_nothing(tmp_path, monkeypatch, stepped, path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError) as refused:
        save_state(stepped, path, epoch=7)
    assert repr(path)[1:-1] in one_line(refused)
    with pytest.raises(UserError) as refused:
        load_state(stepped, path)
    assert repr(path)[1:-1] in one_line(refused)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]
    assert (tmp_path / "file").read_text() == "mine"


def test_a_name_as_long_as_the_file_system_takes_is_saved(tmp_path, stepped):
    path = tmp_path / ("a" * 243 + ".safetensors")
    for _ in range(2):
        save_state(stepped, path, epoch=7)
    load_state(memory(), path)
    assert list(tmp_path.iterdir()) == [path]


def other_tensors(path):
    save_file({"w": np.ones(3, np.float32)}, path)


def other_format(path):
    save_file({"w": np.ones(3, np.float32)}, path, {"format": "pt"})


def half_floats(path):
    # NumPy has no such type; as safetensors lays it out: length of the header, header, data.
    header = b'{"w":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))


def text(path):
    path.write_text("mine")


def nothing(path):
    path.touch()


@pytest.mark.parametrize("make", [other_tensors, other_format, half_floats, text, nothing])
def test_a_foreign_file_is_neither_loaded_nor_replaced(tmp_path, stepped, make):
    path = tmp_path / "weights.safetensors"
    make(path)
    before = path.read_bytes()
    with pytest.raises(UserError, match="exists and is no memory state; give another path") as refused:
        save_state(stepped, path, epoch=7)
    assert str(path) in one_line(refused)
    reason = (
        "cannot be read" if make in (text, nothing) else "has format .* expected 'aura_ros memory state 1'"
    )
    with pytest.raises(UserError, match=reason) as refused:
        load_state(stepped, path)
    assert str(path) in one_line(refused)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_state_of_half_floats_under_our_name_is_refused(tmp_path, stepped):
    path = tmp_path / "state.safetensors"
    save_state(stepped, path, epoch=7)
    with safe_open(path, framework="numpy") as saved:
        ours = saved.metadata()
    header = json.dumps(
        {"__metadata__": ours, "fast_weights": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}
    ).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(UserError, match="cannot be read") as refused:
        load_state(stepped, path)
    one_line(refused)


def test_a_pipe_is_refused_at_once_and_not_waited_for(tmp_path, stepped):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    # Should it be opened, then by us, so that nothing waits for ever.
    end = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    try:
        with pytest.raises(UserError, match="exists and is no memory state"):
            save_state(stepped, path, epoch=7)
        with pytest.raises(UserError, match="is not a file"):
            load_state(stepped, path)
    finally:
        os.close(end)
    assert path.is_fifo()


def test_an_older_state_is_replaced_by_a_newer_one(tmp_path, stepped):
    path = tmp_path / "state.safetensors"
    save_state(memory(), path, epoch=7)
    save_state(stepped, path, epoch=8)
    restored = memory()
    load_state(restored, path)
    assert restored.steps == stepped.steps == 5
    assert list(tmp_path.iterdir()) == [path]
