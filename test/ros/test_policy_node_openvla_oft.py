"""The policy node on a published checkpoint folder: the reference's layout at test size, through real topics."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("rclpy", reason="rclpy is not installed")
pytest.importorskip("aura_ros.msg", reason="the messages are not built")

from llama_like import write_tokenizer
from oft_folder import write_folder
from policy_driver import loop, stamp_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tokenizer(write_folder(tmp_path_factory.mktemp("node") / "oft"))


def test_a_published_folder_answers_every_observation_with_a_chunk(ros, folder):
    running = loop(ros, backbone="openvla_oft", checkpoint=str(folder))
    for index in range(3):
        chunk = running.driver.query(index)
        data = np.array(chunk.data).reshape(8, 7)
        assert np.isfinite(data).all()
        assert set(data[:, 6]) <= {0.0, 1.0}
    ros.spin_until(lambda: len(running.driver.gates) == 3 and running.driver.infos, what="gates and info")
    info = running.driver.infos[-1]
    assert (info.backbone, info.trained, info.hidden_dim) == ("openvla-oft", True, 64)
    assert info.checkpoint == str(folder)
    assert len(info.checkpoint_hash) == 64
    assert info.image_rotation.startswith("mirror left-right ->")
    assert {gate.state_bytes for gate in running.driver.gates} == {4224}
    assert running.worker.policy.backbone.config.image.mirror


def test_the_parameters_say_what_a_checkpoint_does_not(ros, folder):
    running = loop(
        ros,
        backbone="openvla_oft",
        checkpoint=str(folder),
        openvla_oft__image_flip="none",
        openvla_oft__horizon=5,
        openvla_oft__cameras="agentview, wrist",
        memory_step_period=8,
    )
    running.driver.send(stamp_of(0))
    ros.spin_until(lambda: bool(running.driver.chunks and running.driver.infos), what="a chunk")
    assert len(running.driver.chunks[-1].data) == 5 * 7
    assert running.driver.infos[-1].image_rotation.startswith("no mirror ->")
