"""The policy node runs a backbone that another package adds, and says what there is when a name is unknown."""

import pytest

pytest.importorskip("rclpy", reason="rclpy is not installed")
pytest.importorskip("aura_ros.msg", reason="the messages are not built")

from policy_driver import loop, make_policy

from aura_ros.errors import UserError


@pytest.fixture
def my_policy(tmp_path, monkeypatch):
    """A package with a backbone, as after `pip install`."""
    info = tmp_path / "other_policy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other_policy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[aura_ros.backbones]\nmy_policy = gpt2_policy:make\n")
    monkeypatch.syspath_prepend(str(tmp_path))


def test_node_answers_with_the_backbone_of_another_package(ros, my_policy):
    run = loop(ros, backbone="my_policy", seed=4)
    chunk = run.driver.query(0)
    assert len(chunk.data) == 8 * 7
    ros.spin_until(lambda: run.driver.infos, what="the policy's info")
    info = run.driver.infos[-1]
    assert (info.backbone, info.checkpoint) == ("gpt2_policy", "random:seed=4")
    ros.spin_until(lambda: run.driver.gates, what="the memory step's event")


def test_unknown_backbone_is_refused_with_what_there_is(ros, my_policy):
    with pytest.raises(
        UserError, match="backbone 'best' is not known; choose one of: compact, openvla_oft, my_policy"
    ):
        make_policy(ros, backbone="best")
