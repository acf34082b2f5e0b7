"""A memory's state survives a restart as a file bound to its weights."""

import numpy as np
import pytest

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


@pytest.mark.parametrize("path", ["", "missing_folder/state.safetensors"])
def test_a_path_that_cannot_be_written_is_one_line_and_leaves_nothing(tmp_path, monkeypatch, stepped, path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as refused:
        save_state(stepped, path, epoch=7)
    assert "\n" not in str(refused.value)
    assert list(tmp_path.iterdir()) == []
