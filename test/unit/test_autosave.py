"""The memory's file: what it holds, which of two writers wins, and what is refused."""

import json
import os

import numpy as np
import pytest
from tiny_backbone import tiny_memory

from aura_ros.control.statistics import Rejections
from aura_ros.errors import UserError
from aura_ros.memory.state_file import read_noted, write_state
from aura_ros.nodes.autosave import FAILED, Autosave, Saved
from aura_ros.nodes.policy_config import PolicyNodeConfig

EPISODE = (400, (7, "libero_10", 0, 0, 3))


class Log:
    def __init__(self):
        self.said = []

    def warning(self, text):
        self.said.append(text)


@pytest.fixture
def memory():
    memory = tiny_memory()
    memory.step(np.ones(24, np.float32), force=True)
    return memory


@pytest.fixture
def made(memory, tmp_path):
    """Autosave, its rejections and its log."""
    rejections, log = Rejections(), Log()
    config = PolicyNodeConfig(memory__autosave=str(tmp_path / "memory.safetensors"))
    return Autosave(config, memory.weights_hash, rejections, log), rejections, log


def accept(saved):
    pass


def test_what_is_saved_is_read_back_to_the_bit(made, memory):
    chunk = np.random.default_rng(0).standard_normal((8, 7)).astype(np.float32)
    saved = Saved(
        memory.state_dict(), EPISODE, 12345678901234567, chunk, {"level": 0.1 + 0.2, "ages": [3, 1]}
    )
    made[0].save(saved, 5, 1)
    found = made[0].read(accept)
    assert (found.episode, found.stamp_ns, found.budget) == (EPISODE, saved.stamp_ns, saved.budget)
    assert found.chunk.tobytes() == chunk.tobytes()
    for name, array in saved.state.items():
        assert found.state[name].tobytes() == array.tobytes()


def test_without_a_file_or_with_restoring_off_a_memory_begins_empty(made, memory):
    autosave, _, log = made
    assert autosave.read(accept) is None
    autosave.save(Saved(memory.state_dict()), 1, 1)
    config = PolicyNodeConfig(memory__autosave=autosave.path, memory__restore=False)
    assert Autosave(config, memory.weights_hash, Rejections(), log).read(accept) is None
    assert Autosave(PolicyNodeConfig(), memory.weights_hash, Rejections(), log).read(accept) is None


@pytest.mark.parametrize("older", [(4, 9), (5, 1)])
def test_a_writer_that_comes_late_does_not_replace_what_is_newer(made, memory, older):
    autosave = made[0]
    autosave.save(Saved(memory.state_dict(), stamp_ns=2), 5, 2)
    autosave.save(Saved(memory.state_dict(), stamp_ns=1), *older)
    assert autosave.read(accept).stamp_ns == 2


def test_a_write_that_fails_is_counted_each_time_and_logged_once(made, memory, tmp_path):
    autosave, rejections, log = made
    autosave.save(Saved(memory.state_dict()), 1, 1)
    away = tmp_path.with_name("away")
    os.rename(tmp_path, away)
    for step in (2, 3):
        autosave.save(Saved(memory.state_dict()), 1, step)
    assert rejections.items() == [(FAILED, 2)]
    assert len(log.said) == 1
    assert autosave.path in log.said[0]
    os.rename(away, tmp_path)
    autosave.save(Saved(memory.state_dict(), stamp_ns=4), 1, 4)
    assert autosave.read(accept).stamp_ns == 4
    os.rename(tmp_path, away)
    autosave.save(Saved(memory.state_dict()), 1, 5)
    assert len(log.said) == 2, "it had worked again meanwhile"
    os.rename(away, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["memory.safetensors"]


def test_a_file_of_save_memory_is_a_memory_to_begin_with(made, memory):
    write_state(memory.state_dict(), memory.weights_hash, made[0].path, 3)
    found = made[0].read(accept)
    assert (found.episode, found.stamp_ns, found.chunk, found.budget) == (None, None, None, None)
    # And the other way round.
    made[0].save(Saved(memory.state_dict(), EPISODE, 5), 4, 1)
    assert read_noted(memory.weights_hash, made[0].path)[0]["steps"] == 1


NOTES = [
    "no json",
    "[]",
    "{}",
    json.dumps({"episode": 3, "stamp_ns": None, "chunk": None, "budget": None}),
    json.dumps({"episode": [1], "stamp_ns": None, "chunk": None, "budget": None}),
    json.dumps({"episode": None, "stamp_ns": "x", "chunk": None, "budget": None}),
    json.dumps({"episode": None, "stamp_ns": None, "chunk": [[1], [1, 2]], "budget": None}),
    json.dumps({"episode": None, "stamp_ns": None, "chunk": None, "budget": {"level": 1}}),
]


@pytest.mark.parametrize("note", NOTES)
def test_a_note_that_cannot_be_right_is_refused_in_one_line(made, memory, note):
    write_state(memory.state_dict(), memory.weights_hash, made[0].path, 3, note)
    with pytest.raises(UserError, match="remove the file or set memory.restore to false") as refused:
        made[0].read(accept)
    assert made[0].path in str(refused.value)
    assert "\n" not in str(refused.value)


def test_broken_and_foreign_files_are_refused_in_one_line_that_says_what_to_do(made, memory, tmp_path):
    path = tmp_path / "memory.safetensors"
    made[0].save(Saved(memory.state_dict()), 1, 1)
    whole = path.read_bytes()
    broken = [whole[: len(whole) // 2], b"", b"not a tensor file"]
    for data in broken:
        path.write_bytes(data)
        with pytest.raises(UserError, match="^memory.autosave: .*set memory.restore to false$"):
            made[0].read(accept)
    other = tiny_memory(seed=5)
    write_state(other.state_dict(), other.weights_hash, tmp_path / "other.safetensors", 1)
    os.replace(tmp_path / "other.safetensors", path)
    with pytest.raises(UserError, match="belongs to weights .*set memory.restore to false$"):
        made[0].read(accept)


def test_an_episode_that_began_since_is_told_and_an_unknown_one_is_not(memory):
    saved = Saved(memory.state_dict(), EPISODE)
    assert saved.is_before((400, (8, "libero_10", 0, 0, 3)))
    assert not saved.is_before(EPISODE)
    assert not saved.is_before(None)
    assert not Saved(memory.state_dict()).is_before(EPISODE)
