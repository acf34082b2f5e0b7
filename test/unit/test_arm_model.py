"""The stand-in arm without ROS: geometry, motion, and what it says about commands that a robot would refuse."""

import itertools
import math

import numpy as np
import pytest
from arm_chain import Chain, quaternion, rotation
from arm_config import ArmConfig
from arm_judge import NS, Point
from arm_model import BASE, STEP_NS, TIP, URDF, Arm

from aura_ros.errors import UserError

START = 5 * NS
HALF = math.pi / 2
NAMES = ("shoulder_pan", "shoulder_lift", "elbow_flex", "forearm_roll", "wrist_flex", "wrist_roll")
REACH = 0.3 + 0.1 + 0.15 + 0.05 + 0.1  # from the shoulder to the tip


@pytest.fixture(scope="module")
def chain():
    return Chain(URDF, BASE, TIP)


def arm(**options):
    lines = []
    robot = Arm(ArmConfig(**options))
    robot.judge.on_violation = lines.append
    robot.advance(START)
    return robot, lines


def kinds(lines):
    return [line.split(":")[0] for line in lines]


@pytest.mark.parametrize(
    ("positions", "place", "pointing"),
    [
        ((0, 0, 0, 0, 0, 0), (0, 0, 0.15 + REACH), (0, 0, 1)),
        ((0, HALF, 0, 0, 0, 0), (REACH, 0, 0.15), (1, 0, 0)),
        ((HALF, HALF, 0, 0, 0, 0), (0, REACH, 0.15), (0, 1, 0)),
        ((0, 0, HALF, 0, 0, 0), (REACH - 0.3, 0, 0.45), (1, 0, 0)),
        # A roll of the forearm turns the wrist's bend aside.
        ((0, 0, 0, HALF, HALF, 0), (0, 0.15, 0.15 + 0.3 + 0.1 + 0.15), (0, 1, 0)),
    ],
)
def test_tip_is_where_a_ruler_says(chain, positions, place, pointing):
    pose = chain.pose(np.array(positions, float))
    assert pose[:3, 3] == pytest.approx(place, abs=1e-12)
    assert pose[:3, 2] == pytest.approx(pointing, abs=1e-12)


def test_rpy_turns_about_fixed_axes_in_the_order_of_the_urdf_specification(tmp_path):
    file = tmp_path / "two.urdf"
    file.write_text(
        '<robot name="r"><joint name="f" type="fixed"><parent link="base"/><child link="a"/>'
        f'<origin xyz="1 0 0" rpy="{HALF} 0 {HALF}"/></joint>'
        '<joint name="j" type="prismatic"><parent link="a"/><child link="tip"/><axis xyz="0 0 2"/></joint></robot>'
    )
    # Roll first: z goes to -y; yaw then: -y goes to x. The axis is a direction, whatever its length.
    assert Chain(file, "base", "tip").pose(np.array([0.5]))[:3, 3] == pytest.approx((1.5, 0, 0), abs=1e-12)


def test_chain_refuses_what_it_cannot_move(tmp_path):
    file = tmp_path / "planar.urdf"
    file.write_text(
        '<robot name="r"><joint name="j" type="planar"><parent link="base"/><child link="tip"/></joint></robot>'
    )
    with pytest.raises(UserError, match="joint 'j' is planar; this arm knows: revolute, prismatic, fixed"):
        Chain(file, "base", "tip")
    with pytest.raises(UserError, match="link 'nose' does not hang on 'base'"):
        Chain(URDF, BASE, "nose")


def test_jacobian_equals_finite_differences(chain):
    rng = np.random.default_rng(0)
    for _ in range(20):
        q = rng.uniform(chain.lower, chain.upper)
        jacobian, step = chain.jacobian(q), 1e-6
        for joint in range(6):
            ahead, behind = (chain.pose(q + sign * step * np.eye(6)[joint]) for sign in (1, -1))
            linear = (ahead[:3, 3] - behind[:3, 3]) / (2 * step)
            spin = (ahead[:3, :3] - behind[:3, :3]) @ chain.pose(q)[:3, :3].T / (2 * step)
            angular = np.array([spin[2, 1], spin[0, 2], spin[1, 0]])
            np.testing.assert_allclose(jacobian[:, joint], [*linear, *angular], atol=1e-8)


def test_quaternion_of_every_turn_gives_the_turn_back():
    rng = np.random.default_rng(1)
    turns = [rotation(axis, angle) for axis in np.eye(3) for angle in (0, HALF, math.pi, -3)]
    turns += [rotation(v / np.linalg.norm(v), 3.1) for v in rng.standard_normal((20, 3))]
    for turn in turns:
        x, y, z, w = quaternion(turn)
        vector, cross = np.array([x, y, z]), np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
        again = np.eye(3) + 2 * w * cross + 2 * cross @ cross
        assert np.linalg.norm([*vector, w]) == pytest.approx(1)
        np.testing.assert_allclose(again, turn, atol=1e-9)


@pytest.mark.parametrize("axis", range(3))
def test_twist_moves_the_tip_along_it(axis):
    robot, lines = arm()
    before = robot.pose()
    speed = 0.1 * np.eye(3)[axis]
    for tick in range(20):
        now = START + tick * NS // 20
        robot.take_twist([*speed, 0, 0, 0], BASE, now, now)
    robot.advance(START + NS)
    moved = robot.pose()[:3, 3] - before[:3, 3]
    # A second of 0.1 m/s, less the lag of 0.02 s.
    assert moved == pytest.approx(speed * 0.98, abs=0.002)
    np.testing.assert_allclose(robot.pose()[:3, :3], before[:3, :3], atol=0.01)
    assert lines == []


def test_angular_twist_turns_the_tip_on_the_spot_and_tip_frame_is_turned_to_the_base():
    robot, _ = arm()
    start = robot.pose()
    robot.take_twist([0, 0, 0, 0, 0, 1.0], TIP, START, START)
    robot.advance(START + NS // 20)
    turned = start[:3, :3].T @ robot.pose()[:3, :3]
    assert math.atan2(turned[1, 0], turned[0, 0]) == pytest.approx(
        0.05 - 0.02 + 0.02 * math.exp(-2.5), abs=3e-3
    )
    np.testing.assert_allclose(robot.pose()[:3, 3], start[:3, 3], atol=1e-3)


def test_twist_halts_when_no_other_comes_and_the_next_may_start_anew():
    robot, lines = arm(max_linear_step=0.2)
    robot.take_twist([0.15, 0, 0, 0, 0, 0], BASE, START, START)
    robot.advance(START + NS)
    place = robot.pose()[:3, 3]
    robot.advance(START + 2 * NS)
    assert np.abs(robot.velocity).max() < 1e-6
    assert robot.pose()[:3, 3] == pytest.approx(place, abs=1e-9)
    assert robot.halts == 1
    robot.take_twist([-0.15, 0, 0, 0, 0, 0], BASE, START + 2 * NS, START + 2 * NS)
    assert lines == []  # from standing still, not from +0.15


@pytest.mark.parametrize(
    ("values", "frame", "age", "kind", "words"),
    [
        ([0, 0, 0], BASE, 0, "size", "3 values; 6 are needed"),
        ([math.nan, 0, 0, 0, 0, 0], BASE, 0, "nan", "finite numbers are needed"),
        ([0, 0, 0, 0, 0, math.inf], BASE, 0, "nan", "finite"),
        ([0.1, 0, 0, 0, 0, 0], "world", 0, "frame", "frame 'world' is unknown; known: base, tool0"),
        ([0.1, 0, 0, 0, 0, 0], "", 0, "frame", "frame '' is unknown"),
        ([0.1, 0, 0, 0, 0, 0], BASE, 0.15, "stale", "0.150 s old; younger than 0.1 s is needed"),
        ([0.1, 0, 0, 0, 0, 0], BASE, None, "stale", "its stamp is 0"),
    ],
)
def test_twist_that_servo_would_not_follow_is_told_and_moves_nothing(values, frame, age, kind, words):
    robot, lines = arm()
    stamp = None if age is None else START - round(age * NS)
    robot.take_twist(values, frame, stamp, START)
    robot.advance(START + NS)
    assert kinds(lines) == [kind]
    assert words in lines[0]
    assert not robot.travel.any()


def test_twist_too_fast_or_too_sudden_is_told_but_a_stop_is_not():
    robot, lines = arm(max_linear=0.5, max_linear_step=0.2)
    for tick, speed in enumerate((0.2, 0.4, 0.55, 0.0)):
        now = START + tick * NS // 20
        robot.take_twist([speed, 0, 0, 0, 0, 0], BASE, now, now)
    assert lines == ["velocity_limit: twist 3: linear 0.55 m/s; allowed: 0.5"]
    robot.take_twist([0.4, 0, 0, 0, 0, 0], BASE, now, now)
    assert lines[1:] == ["step: twist 5: linear changes by 0.4 m/s; allowed: 0.2"]


def test_arm_slows_itself_to_its_own_limits_and_stays_within_them():
    robot, lines = arm(max_linear=100.0, max_linear_step=100.0)
    low, high, most = robot.chain.lower, robot.chain.upper, robot.chain.velocity
    for tick in range(60):
        now = START + tick * NS // 20
        robot.take_twist([0, 5.0, -5.0, 0, 0, 0], BASE, now, now)
        assert np.all((robot.position >= low) & (robot.position <= high))
        assert np.all(np.abs(robot.velocity) <= most + 1e-9)
    # Servo's halt at a joint's bound.
    assert lines == []
    assert robot.summary()["bound_halts"] >= 1


def test_velocities_that_drive_a_joint_into_its_limit_are_told_once():
    robot, lines = arm(command_type="float64_array", array_of="velocity", max_velocity_step=3.0)
    robot.take_array([0, 0, 0, 0, 0, 2.9], START)
    # A forward controller has no time-out.
    robot.advance(START + 3 * NS)
    assert robot.position[5] == 3.0
    assert lines == ["position_limit: velocities: wrist_roll driven into its limit 3"]


def test_array_of_velocities_is_judged_by_joint():
    robot, lines = arm(command_type="float64_array", array_of="velocity")
    robot.take_array([2.5, 0, 0, 0, 0, 0], START)
    robot.take_array([2.0, 0, 0, 0, 0], START)
    assert lines == [
        "velocity_limit: float64_array 1: shoulder_pan 2.5; allowed: -2 to 2",
        "step: float64_array 1: shoulder_pan changes by 2.5 rad/s; allowed: 1",
        "size: float64_array 2: 5 values; 6 are needed",
    ]


def test_array_of_positions_is_followed_with_the_lag_and_a_jump_is_told():
    robot, lines = arm(command_type="float64_array", lag=0.05)
    goal = robot.position + 0.05 * np.eye(6)[0]
    robot.take_array(goal, START)
    robot.advance(START + NS // 20)
    assert robot.position[0] == pytest.approx(0.05 * (1 - math.exp(-1)), abs=1e-6)
    robot.advance(START + NS)
    assert robot.position == pytest.approx(goal, abs=1e-6)
    assert lines == []
    robot.take_array(goal + 0.5 * np.eye(6)[1], START + NS)
    robot.take_array([0, 0, 0, 0, 0, -3.5], START + NS)
    assert kinds(lines) == ["step", "position_limit", "step"]
    assert "shoulder_lift at 0.9 lies 0.5 rad from where it is; allowed: 0.2" in lines[0]
    assert "wrist_roll -3.5; allowed: -3 to 3" in lines[1]


def path(robot, *steps, seconds=0.1):
    """Points in which every joint goes on by so much."""
    positions = list(itertools.accumulate(steps, lambda at, step: at + step, initial=robot.position))[1:]
    return [Point(round((i + 1) * seconds * NS), position) for i, position in enumerate(positions)]


def test_trajectory_is_interpolated_and_its_end_held():
    robot, lines = arm(lag=0.001)
    home = robot.position.copy()
    points = path(robot, 0.1, -0.05)
    robot.take_trajectory(NAMES, points, None, START)
    for seconds, wanted in ((0.05, 0.05), (0.1, 0.1), (0.15, 0.075), (0.2, 0.05), (1.0, 0.05)):
        robot.advance(START + round(seconds * NS))
        assert robot.position - home == pytest.approx(wanted, abs=2e-3)
    assert lines == []


def test_trajectory_maps_joints_by_name():
    robot, _ = arm()
    goal = dict(zip(NAMES, robot.position + np.arange(6) * 0.02, strict=True))
    names = sorted(NAMES)
    robot.take_trajectory(names, [Point(NS // 10, [goal[name] for name in names])], None, START)
    robot.advance(START + NS)
    assert robot.position == pytest.approx(list(goal.values()), abs=1e-6)


def test_new_trajectory_replaces_the_old_from_where_the_arm_is_and_an_empty_one_holds():
    robot, lines = arm(lag=0.001)
    home = robot.position.copy()
    robot.take_trajectory(NAMES, path(robot, 0.1, 0.1), None, START)
    robot.advance(START + NS // 10)
    robot.take_trajectory(NAMES, [Point(NS // 10, home)], None, START + NS // 10)
    robot.advance(START + NS * 15 // 100)
    assert robot.position - home == pytest.approx(0.05, abs=3e-3)
    robot.take_trajectory([], [], None, START + NS * 15 // 100)
    held = robot.position.copy()
    robot.advance(START + NS)
    assert robot.position == pytest.approx(held, abs=2e-3)
    assert lines == []


def test_trajectory_of_the_past_is_joined_midway_and_one_of_the_future_is_approached():
    robot, lines = arm(lag=0.001, max_position_step=0.15)
    home = robot.position.copy()
    robot.take_trajectory(NAMES, path(robot, 0.1, 0.1, 0.0), START - NS // 10 - STEP_NS, START)
    robot.advance(START + NS // 10)
    assert robot.position - home == pytest.approx(0.2, abs=5e-3)
    after = START + NS // 10
    later = path(robot, -0.1)
    robot.take_trajectory(NAMES, later, after + NS // 10, after)
    robot.advance(after + NS // 10)
    assert robot.position - home == pytest.approx(0.15, abs=5e-3)
    robot.take_trajectory(NAMES, later, after - NS, after + NS // 10)
    # The first one's second point is the first to come, two steps away.
    assert kinds(lines) == ["step", "times"]
    assert "it ended 1.000 s ago; its stamp must be 0 (start now) or later" in lines[1]


@pytest.mark.parametrize(
    ("names", "change", "kind", "words"),
    [
        ((), {}, "names", "no joint names"),
        ((*NAMES[:5], "nose"), {}, "names", "joint 'nose' is unknown; known: shoulder_pan"),
        ((*NAMES, "elbow_flex"), {}, "names", "joint 'elbow_flex' is given twice"),
        (NAMES[:5], {}, "partial", "joint 'wrist_roll' is missing; partial goals are refused"),
        (NAMES, {"positions": [0.0] * 5}, "size", "point 0 has 5 positions for 6 joints"),
        (NAMES, {"velocities": [0.0] * 5}, "size", "point 0 has 5 velocities for 6 joints"),
        (NAMES, {"positions": [math.nan] * 6}, "nan", "point 0 has positions"),
        (NAMES, {"velocities": [0.1] * 6}, "times", "the last point has a velocity"),
        (NAMES, {"time_ns": 0}, "times", "time_from_start of point 0 is 0 s; it must be after 0 s"),
    ],
)
def test_trajectory_that_a_controller_refuses_is_told_and_moves_nothing(names, change, kind, words):
    robot, lines = arm()
    point = {"time_ns": NS // 10, "positions": robot.position + 0.05, **change}
    robot.take_trajectory(names, [Point(**point)], None, START)
    robot.advance(START + NS)
    assert kinds(lines) == [kind]
    assert words in lines[0]
    assert not robot.travel.any()


def test_times_of_a_trajectory_must_rise():
    robot, lines = arm()
    robot.take_trajectory(NAMES, [Point(NS, robot.position), Point(NS, robot.position)], None, START)
    assert lines == ["times: joint_trajectory 1: time_from_start of point 1 is 1 s; it must be after 1 s"]


def test_trajectory_too_fast_between_two_points_is_told():
    robot, lines = arm()
    robot.take_trajectory(NAMES, path(robot, 0.15, 0.15, seconds=0.05), None, START)
    assert lines == ["velocity_limit: joint_trajectory 1: shoulder_pan 3; allowed: -2 to 2"]


def test_jog_moves_the_named_joints_and_stops():
    robot, lines = arm(command_type="joint_jog")
    robot.take_jog(["wrist_roll"], [0.5], START, START)
    robot.advance(START + NS)
    assert robot.travel[5] == pytest.approx(0.05, abs=0.005)
    assert not robot.travel[:5].any()
    robot.take_jog(["nose"], [0.5], START + NS, START + NS)
    robot.take_jog(["wrist_roll"], [0.5, 0.5], START + NS, START + NS)
    assert kinds(lines) == ["names", "size"]


def test_gripper_closes_at_its_speed_and_refuses_what_is_no_share():
    robot, lines = arm()
    robot.take_gripper([0.0], START)
    robot.advance(START + NS // 10)
    assert 0.4 < robot.gripper < 0.6  # 0.2 m/s over 0.04 m: a fifth of a second
    robot.advance(START + NS)
    assert robot.finger_positions == pytest.approx([0, 0], abs=1e-3)
    robot.take_gripper([1.2], START + NS)
    robot.take_gripper([0.1, 0.1], START + NS)
    assert kinds(lines) == ["position_limit", "size"]


def test_motion_after_an_estop_is_a_violation_and_does_not_happen_a_stop_is_none():
    robot, lines = arm()
    robot.take_twist([0.1, 0, 0, 0, 0, 0], BASE, START, START)
    now = START + NS // 20
    robot.set_estop(True, now)
    travel = robot.travel.copy()
    robot.take_twist([0.1, 0, 0, 0, 0, 0], BASE, now, now)  # under way already
    now += NS // 2
    robot.take_twist([0, 0, 0, 0, 0, 0], BASE, now, now)
    robot.take_twist([0.1, 0, 0, 0, 0, 0], BASE, now, now)
    robot.advance(now + NS)
    assert lines == ["after_estop: twist 4: 0.500 s after commands had to end"]
    assert robot.stops_after_estop == 1
    assert robot.travel == pytest.approx(travel)
    robot.set_estop(False, now + NS)
    robot.take_twist([0.1, 0, 0, 0, 0, 0], BASE, now + NS, now + NS)
    robot.advance(now + 2 * NS)
    assert robot.travel.sum() > travel.sum()
    assert len(lines) == 1


def test_any_command_in_an_expected_silence_is_a_violation():
    robot, lines = arm(command_type="float64_array")
    robot.expect_silence(True, START)
    robot.take_array(robot.position, START + NS // 20)
    robot.take_array(robot.position, START + NS)
    robot.expect_silence(False, START + 2 * NS)
    robot.take_array(robot.position, START + 3 * NS)
    assert lines == ["not_silent: float64_array 2: 1.000 s after commands had to end"]


def test_latency_delays_what_a_command_does_and_dropped_ones_do_nothing():
    robot, _ = arm(command_type="float64_array", fault__latency=0.5)
    robot.take_array(robot.position + 0.05, START)
    robot.advance(START + NS // 2)
    assert not robot.travel.any()
    robot.advance(START + NS)
    assert robot.travel == pytest.approx(np.full(6, 0.05), abs=1e-3)
    robot.configure(robot.config.with_fault("drop_commands=1.0"))
    robot.take_array(robot.position + 0.05, START + NS)
    robot.advance(START + 3 * NS)
    assert robot.travel == pytest.approx(np.full(6, 0.05), abs=1e-3)
    assert robot.dropped == 1


def test_same_seed_drops_the_same_commands():
    def dropped(seed):
        robot, _ = arm(command_type="float64_array", fault__drop_commands=0.5, seed=seed)
        counts = []
        for _ in range(40):
            robot.take_array(robot.position, START)
            counts.append(robot.dropped)
        return counts

    assert dropped(1) == dropped(1) != dropped(2)


def test_faults_are_set_by_name_and_cleared():
    config = ArmConfig(seed=3).with_fault("latency=0.2").with_fault("nan_joint = elbow_flex")
    config = config.with_fault("freeze_states=true")
    assert (config.fault__latency, config.fault__nan_joint, config.fault__freeze_states) == (
        0.2,
        "elbow_flex",
        True,
    )
    assert config.with_fault("clear") == ArmConfig(seed=3)
    with pytest.raises(
        UserError, match="fault 'gravity=1' is not known; give NAME=VALUE with one of: latency, "
    ):
        config.with_fault("gravity=1")
    with pytest.raises(UserError, match="stop_camera 'left' is not known; choose one of: "):
        config.with_fault("stop_camera=left")


def test_home_outside_of_the_limits_is_refused():
    with pytest.raises(
        UserError, match=r"home \[9.0, .* does not fit; give 6 positions within the limits of shoulder_pan"
    ):
        Arm(ArmConfig(home=(9.0, 0, 0, 0, 0, 0)))


def test_summary_counts_commands_violations_and_travel():
    robot, _ = arm(joint_prefix="left_")
    robot.take_twist([0.1, 0, 0, 0, 0, 0], BASE, START, START)
    robot.take_twist([], BASE, START, START)
    robot.advance(START + NS)
    summary = robot.summary()
    assert summary["commands"] == {"twist": 2}
    assert summary["violations"] == {"size": 1}
    assert (summary["violations_total"], summary["halts"]) == (1, 1)
    assert set(summary["joint_travel"]) == {f"left_{name}" for name in NAMES}
    assert sum(summary["joint_travel"].values()) > 0.01
