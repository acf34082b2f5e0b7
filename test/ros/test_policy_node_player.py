"""What the chunk player reports: the queue's depth in the status, and queries before it runs dry."""

import time
from itertools import pairwise

import pytest

pytest.importorskip("rclpy", reason="rclpy is not installed")
pytest.importorskip("aura_ros.msg", reason="the messages are not built")

from aura_ros.msg import ChunkState
from policy_driver import REALTIME, header_of, loop
from rclpy.qos import qos_profile_sensor_data

from aura_ros.nodes import qos

PERIOD_S = 0.4
LONG = {"image_max_age": 20.0, "proprio_max_age": 20.0, "max_skew": 1.0, "use_sim_time": False}


def realtime(ros, **parameters):
    running = loop(
        ros, **(REALTIME | LONG | parameters), driver_options={"sensor_qos": qos_profile_sensor_data}
    )
    player = running.driver.node.create_publisher(ChunkState, "chunk_state", qos.RELIABLE)
    ros.spin_until(lambda: player.get_subscription_count() > 0, what="the player's subscription")
    return running, player


def test_the_status_tells_the_rows_that_the_player_has_left_of_this_epoch(ros):
    running, player = realtime(ros)
    driver, worker = running.driver, running.worker

    def depth():
        return driver.wait_for_status(lambda status: True).queue_depth

    def reported(rows_left):
        """Report until a heartbeat tells of it, however busy the machine is."""
        seen = len(driver.statuses)

        def told():
            player.publish(ChunkState(epoch=worker.epoch, rows_left=rows_left))
            return any(status.queue_depth == rows_left for status in driver.statuses[seen:])

        ros.spin_until(told, what=f"a depth of {rows_left}")

    assert depth() == 0
    reported(5)
    driver.wait_for_status(lambda status: status.queue_depth == 0, "a depth of 0 once the report is old")
    player.publish(ChunkState(epoch=worker.epoch - 1, rows_left=7))
    ros.spin_for(0.3)
    assert depth() == 0
    reported(3)
    assert driver.call("reset").success
    assert driver.wait_for_status(lambda status: status.epoch == worker.epoch).queue_depth == 0


def gaps(ros, running, player, rows_left, count=5):
    """Seconds between queries, frames coming all the time and the player saying (None: nothing) what it has left."""
    asked, act = [], running.worker.policy.act
    running.worker.policy.act = lambda observation: (asked.append(time.monotonic()), act(observation))[1]
    begin = time.monotonic()
    while len(asked) < count:
        assert time.monotonic() < begin + 30
        running.driver.send(time.time_ns())
        if rows_left is not None:
            player.publish(ChunkState(epoch=running.worker.epoch, rows_left=rows_left))
        ros.spin_for(0.02)
    stamps = [header_of(gate) for gate in running.driver.gates]
    assert stamps == sorted(set(stamps)), "never about the same messages again"
    return [later - earlier for earlier, later in pairwise(asked)]


def test_a_player_that_runs_dry_is_sent_the_next_chunk_early_but_not_before_half_a_period(ros):
    running, player = realtime(ros)
    found = gaps(ros, running, player, rows_left=0)
    assert min(found) < 0.8 * PERIOD_S
    assert all(gap > 0.4 * PERIOD_S for gap in found)


@pytest.mark.parametrize(
    ("rows_left", "prefetch"), [(None, True), (8, True), (0, False)], ids=["no-player", "full", "off"]
)
def test_without_need_the_fixed_grid_stands(ros, rows_left, prefetch):
    running, player = realtime(ros, prefetch=prefetch)
    found = gaps(ros, running, player, rows_left)
    assert sum(found) > 0.95 * len(found) * PERIOD_S
