"""The real LIBERO environment: what it shows, what it refuses, and that it repeats itself."""

import hashlib
import io
import logging
import os
import subprocess
import sys
import textwrap
import threading
from contextlib import redirect_stdout
from dataclasses import replace

import numpy as np
import pytest
from real_libero import LIBERO_MARKS

from aura_ros.errors import UserError
from aura_ros.geometry import GRIPPER_DOWN_XYZW, quaternion_to_axis_angle
from aura_ros.sim import SUITES, ActionError, EpisodeConfig, LiberoEnv, checks, proprio
from aura_ros.sim import libero as sim_libero
from aura_ros.sim.official import official_init_states, official_task
from aura_ros.sim.runtime import SetupError, current_gl, load_benchmark
from aura_ros.sim.suites import CUE_SUITES

pytestmark = LIBERO_MARKS

OPEN = -1.0


@pytest.fixture(scope="module")
def env(tmp_path_factory):
    folder = os.getcwd()
    os.chdir(tmp_path_factory.mktemp("cwd"))
    try:
        with LiberoEnv(EpisodeConfig(suite="libero_10", task=0)) as built:
            yield built
    finally:
        os.chdir(folder)


@pytest.fixture
def episode(env):
    env.reset(init_state=0, seed=7)
    return env


def physics(env):
    data = env._env.sim.data
    return data.qpos.tobytes() + data.qvel.tobytes() + np.float64(data.time).tobytes()


def digest_of_episode(env, observe_every=5):
    """States of 11 steps, and frames of some; twin of the program in the subprocess test."""
    env.reset(init_state=0, seed=7)
    actions = np.random.default_rng(3).uniform(-1, 1, (10, 7))
    digest = hashlib.sha256(physics(env))
    for i, action in enumerate(actions):
        if observe_every and i % observe_every == 0:
            for frame in env.observe().images.values():
                digest.update(frame.tobytes())
        env.step(action)
        digest.update(physics(env))
    return digest.hexdigest()


# What it shows


def test_frames_are_the_true_view_of_the_raw_bottom_up_buffer(episode):
    images = episode.observe().images
    assert list(images) == ["agentview", "wrist"]
    for name, camera in (("agentview", "agentview"), ("wrist", "robot0_eye_in_hand")):
        with current_gl(episode._env.sim._render_context_offscreen.gl_ctx):
            raw = episode._env.sim.render(camera_name=camera, width=256, height=256)
        assert images[name].dtype == np.uint8
        assert images[name].shape == (256, 256, 3)
        np.testing.assert_array_equal(images[name], raw[::-1])


def test_true_view_is_neither_flipped_nor_mirrored_against_the_camera_model(episode):
    # The basket's pixels, found by tinting it, lie where the pinhole camera projects it. It is off centre.
    sim = episode._env.sim
    model, body = sim.model._model, episode._env.env.obj_body_id["basket_1"]
    geoms = [g for g in range(model.ngeom) if model.body_rootid[model.geom_bodyid[g]] == body]
    kept = model.geom_matid[geoms].copy(), model.geom_rgba[geoms].copy()
    before = episode.render("agentview").astype(int)
    try:
        model.geom_matid[geoms] = -1
        model.geom_rgba[geoms] = (1, 0, 0, 1)
        tinted = episode.render("agentview").astype(int)
    finally:
        model.geom_matid[geoms], model.geom_rgba[geoms] = kept
    rows, columns = np.nonzero(np.abs(tinted - before).max(axis=2) > 20)
    camera = sim.model.camera_name2id("agentview")
    turn = sim.data.cam_xmat[camera].reshape(3, 3)
    x, y, z = turn.T @ (sim.data.body_xpos[body] - sim.data.cam_xpos[camera])
    focal = 128 / np.tan(np.radians(model.cam_fovy[camera]) / 2)
    expected = (128 + focal * y / z, 128 - focal * x / z)
    found = (rows.mean(), columns.mean())
    assert rows.size > 500
    assert abs(expected[0] - 128) > 30
    assert abs(expected[1] - 128) > 30
    np.testing.assert_allclose(found, expected, atol=25)


def test_joints_have_ros_names_and_robosuites_values_in_that_order(episode):
    for _ in range(3):
        episode.step([0.3, -0.2, 0.1, 0.1, 0.2, -0.3, OPEN])
    seen = episode.observe()
    assert seen.joint_names == (
        "panda_joint1",
        "panda_joint2",
        "panda_joint3",
        "panda_joint4",
        "panda_joint5",
        "panda_joint6",
        "panda_joint7",
        "panda_finger_joint1",
        "panda_finger_joint2",
    )
    official = episode._env.env._get_observations()
    np.testing.assert_array_equal(seen.joint_positions[:7], official["robot0_joint_pos"])
    np.testing.assert_array_equal(seen.joint_velocities[:7], official["robot0_joint_vel"])
    np.testing.assert_array_equal(seen.joint_positions[7:], official["robot0_gripper_qpos"])
    np.testing.assert_array_equal(seen.gripper_qpos, official["robot0_gripper_qpos"])
    np.testing.assert_array_equal(seen.ee_position, official["robot0_eef_pos"])
    np.testing.assert_array_equal(seen.ee_quaternion, official["robot0_eef_quat"])
    assert seen.joint_positions.dtype == seen.joint_velocities.dtype == np.float64
    # And against MuJoCo by joint name; robosuite samples some milliseconds before the step's end.
    data = episode._env.sim.data
    for name, position in zip(seen.joint_names, seen.joint_positions, strict=True):
        mujoco_name = name.replace("panda_finger", "gripper0_finger").replace("panda_", "robot0_")
        assert position == pytest.approx(data.get_joint_qpos(mujoco_name), abs=0.02)


def test_proprioception_equals_robosuites_own_axis_angle(episode):
    from robosuite.utils.transform_utils import quat2axisangle

    signs = set()
    for action in np.random.default_rng(0).uniform(-1, 1, (30, 7)):
        episode.step(action)
        raw = episode._observation
        signs.add(bool(raw["robot0_eef_quat"][3] > 0))
        seen = proprio(replace(SEEN, **{key: raw["robot0_" + name] for key, name in RAW_NAMES.items()}))
        official = (
            raw["robot0_eef_pos"],
            quat2axisangle(raw["robot0_eef_quat"].copy()),
            raw["robot0_gripper_qpos"],
        )
        np.testing.assert_allclose(seen, np.concatenate(official), atol=1e-6)
        assert seen.dtype == np.float32
    assert signs == {True, False}  # w changes sign here, so a branch at w = 0 would be seen


RAW_NAMES = {"ee_position": "eef_pos", "ee_quaternion": "eef_quat", "gripper_qpos": "gripper_qpos"}
SEEN = sim_libero.SimObservation({}, (), *(np.zeros(0),) * 5, sim_time_s=0.0, step=0)


def test_axis_angle_equals_robosuites_for_quaternions_of_the_same_sign(env):
    from robosuite.utils.transform_utils import quat2axisangle

    for quaternion in np.random.default_rng(0).normal(size=(300, 4)):
        unit = quaternion / np.linalg.norm(quaternion)
        positive = unit * np.sign(unit[3])
        np.testing.assert_allclose(quaternion_to_axis_angle(unit), quat2axisangle(positive.copy()), atol=1e-9)
        forward = unit * np.sign(unit[0])
        np.testing.assert_allclose(
            quaternion_to_axis_angle(unit, GRIPPER_DOWN_XYZW), quat2axisangle(forward.copy()), atol=1e-9
        )


def test_simulated_time_is_the_step_times_the_period_and_mujocos_own(episode):
    start = float(episode._env.sim.data.time)
    for _ in range(3):
        episode.step([0, 0, 0, 0, 0, 0, OPEN])
    seen = episode.observe()
    assert (seen.step, seen.sim_time_s, seen.stamp_ns) == (3, 0.15, 150_000_000)
    assert float(episode._env.sim.data.time) - start == pytest.approx(seen.sim_time_s, abs=1e-9)


def test_gripper_command_of_minus_one_opens(episode):
    def opening(command):
        for _ in range(20):
            episode.step([0, 0, 0, 0, 0, 0, command])
        fingers = episode._observation["robot0_gripper_qpos"]
        return fingers[0] - fingers[1]

    assert opening(-1.0) > 0.07
    assert opening(+1.0) < 0.01


def test_unknown_camera_is_refused_with_the_known_ones(episode):
    with pytest.raises(UserError, match="'front' is unknown; choose one of agentview, wrist"):
        episode.render("front")


# It repeats itself


def test_same_seed_gives_the_same_frames_and_states_after_any_other_episode(env):
    first = digest_of_episode(env)
    env.reset(init_state=5, seed=8)
    for action in np.random.default_rng(9).uniform(-1, 1, (25, 7)):
        env.step(action)
    assert digest_of_episode(env) == first


def test_gripper_ramp_of_the_last_episode_is_not_inherited(env):
    env.reset(init_state=0)
    fresh = env._observation["robot0_gripper_qpos"].copy()
    for _ in range(30):
        env.step([0, 0, 0, 0, 0, 0, 1.0])
    env.reset(init_state=0)
    np.testing.assert_array_equal(env._observation["robot0_gripper_qpos"], fresh)


def test_observing_does_not_change_what_follows(env):
    def states(observe):
        env.reset(init_state=0)
        for action in np.random.default_rng(4).uniform(-1, 1, (5, 7)):
            if observe:
                env.observe()
            env.step(action)
        return physics(env)

    assert states(observe=True) == states(observe=False)


def test_fixtures_are_drawn_from_the_configured_seed_and_the_callers_generator_is_given_back(
    env, monkeypatch
):
    drawn = []
    reset = env._env.env.reset
    monkeypatch.setattr(env._env.env, "reset", lambda: (drawn.append(np.random.random()), reset())[1])
    np.random.seed(123)
    expected = np.random.RandomState(123).random(3)
    for seed in (7, 7, 8):
        env.reset(seed=seed)
    assert drawn == [np.random.RandomState(seed).random() for seed in (7, 7, 8)]
    np.testing.assert_array_equal(np.random.random(3), expected)


def test_reset_draws_again_after_a_collision_but_does_not_loop_on_other_errors(env, monkeypatch):
    from robosuite.utils.errors import RandomizationError

    reset = env._env.env.reset
    faults = [RandomizationError("no room"), RandomizationError("no room")]
    monkeypatch.setattr(env._env.env, "reset", lambda: reset() if not faults else _raise(faults.pop()))
    env.reset()
    assert not faults
    for fault in (KeyboardInterrupt(), OSError("broken")):
        faults.append(fault)
        with pytest.raises(type(fault)):
            env.reset()
    faults.extend(RandomizationError("no room") for _ in range(100))
    with pytest.raises(RuntimeError, match="try another seed"):
        env.reset()


def _raise(error):
    raise error


def test_reset_sets_the_official_initial_state_asked_for(env, monkeypatch):
    given = []
    set_init_state = env._env.set_init_state
    monkeypatch.setattr(env._env, "set_init_state", lambda s: (given.append(s.copy()), set_init_state(s))[1])
    env.reset(init_state=3)
    with redirect_stdout(io.StringIO()):
        official = load_benchmark().get_benchmark("libero_10")().get_task_init_states(0)
    assert given[0].tobytes() == official[3].tobytes()
    assert given[0].tobytes() != official[0].tobytes()
    assert env.config.init_state == 3


def test_init_states_are_byte_identical_to_the_published_ones():
    states = official_init_states(EpisodeConfig())
    assert states.shape == (50, 123)
    assert hashlib.sha256(states.tobytes()).hexdigest() == INIT_STATES_SHA256


INIT_STATES_SHA256 = "0a3fec5f02eebb70c1c38b7fa1eebbb74bdc9499d9664dac239552dab6b908da"


@pytest.mark.parametrize("suite", sorted(set(SUITES) - set(CUE_SUITES)))
def test_tasks_have_liberos_order_and_instructions(suite):
    with redirect_stdout(io.StringIO()):
        official = load_benchmark().get_benchmark(suite)()
    assert official.get_num_tasks() == SUITES[suite].tasks
    for task in range(SUITES[suite].tasks):
        assert official_task(EpisodeConfig(suite=suite, task=task)) == official.get_task(task)


def test_instruction_and_limits_come_from_the_task(env):
    assert env.instruction == "put both the alphabet soup and the tomato sauce in the basket"
    assert env.task_name.startswith("LIVING_ROOM_SCENE2_")
    assert env.max_steps == 520
    assert env.control_period_s == 0.05


# What it refuses


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1.6, -1.6])
def test_bad_action_is_refused_before_anything_moves(episode, bad):
    before = physics(episode)
    with pytest.raises(ActionError, match="'y'"):
        episode.step([0, bad, 0, 0, 0, 0, OPEN])
    assert physics(episode) == before
    assert episode.step_count == 0
    assert not episode.step(np.zeros(7)).done


def test_action_between_the_clip_and_the_limit_passes_counts_and_acts_as_one(episode):
    episode.step([0.9, 0, 0, 0, 0, 0, OPEN])
    assert episode.saturated == 0
    episode.reset()
    episode.step([1.4, 0, 0, 0, 0, 0, OPEN])
    assert episode.saturated == 1
    clipped = physics(episode)
    episode.reset()
    assert episode.saturated == 0
    episode.step([1.0, 0, 0, 0, 0, 0, OPEN])
    assert physics(episode) == clipped


def test_rendering_in_another_thread_raises_instead_of_giving_black_frames(episode):
    caught = []

    def look():
        try:
            episode.observe()
        except RuntimeError as error:
            caught.append(str(error))

    thread = threading.Thread(target=look, name="camera")
    thread.start()
    thread.join()
    assert len(caught) == 1
    assert "'camera'" in caught[0]
    assert episode.observe().images["agentview"].any()


def test_other_renderers_of_the_thread_do_not_spoil_the_frames_not_even_when_closed(episode):
    import mujoco

    before = episode.render("agentview")
    model = mujoco.MjModel.from_xml_string("<mujoco><worldbody><geom size='1'/></worldbody></mujoco>")
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    with mujoco.Renderer(model, 32, 32) as other:
        other.update_scene(data)
        other.render()
        np.testing.assert_array_equal(episode.render("agentview"), before)
    np.testing.assert_array_equal(episode.render("agentview"), before)


def test_black_frame_is_an_error(episode, monkeypatch):
    black = np.zeros((256, 256, 3), np.uint8)
    monkeypatch.setattr(episode._env.sim, "render", lambda **_: black)
    with pytest.raises(RuntimeError, match="'agentview' rendered a black frame"):
        episode.observe()


def test_step_limit_ends_the_episode_and_nothing_steps_past_it(episode, monkeypatch):
    monkeypatch.setattr(episode, "max_steps", 2)
    assert not episode.step(np.zeros(7)).done
    last = episode.step(np.zeros(7))
    assert (last.done, last.success, last.reward) == (True, False, 0.0)
    before = physics(episode)
    with pytest.raises(RuntimeError, match=r"call reset\(\)"):
        episode.step(np.zeros(7))
    assert physics(episode) == before


def test_success_is_liberos_goal_and_ends_the_episode(episode, monkeypatch):
    monkeypatch.setattr(episode._env.env, "_check_success", lambda: True)
    result = episode.step(np.zeros(7))
    assert (result.success, result.done, result.reward) == (True, True, 1.0)
    with pytest.raises(RuntimeError, match=r"call reset\(\)"):
        episode.step(np.zeros(7))


def test_diverged_physics_voids_the_episode(episode):
    episode._env.sim.data.qvel[-1] = 1e30
    with pytest.raises(RuntimeError, match="diverged"):
        episode.step(np.zeros(7))
    with pytest.raises(RuntimeError, match=r"call reset\(\)"):
        episode.step(np.zeros(7))


def test_reset_refuses_what_the_configuration_would(episode):
    with pytest.raises(UserError, match=r"init_state 50 .*0\.\.49"):
        episode.reset(init_state=50)
    assert episode.config.init_state == 0


def test_settling_is_within_its_limit(env):
    result = checks.settling(env)
    assert result.ok, result.detail
    assert 0.0 < env.settled_displacement_m < 0.06


def test_objects_that_fly_while_settling_stop_everything(env, monkeypatch):
    env.reset(init_state=0)
    positions = env._object_positions
    lifted = iter((0.0, 0.45))

    def with_a_flying_can():
        return {
            name: p + (next(lifted) if name == "alphabet_soup_1" else 0.0) for name, p in positions().items()
        }

    monkeypatch.setattr(env, "_object_positions", with_a_flying_can)
    with pytest.raises(SetupError, match=r"'alphabet_soup_1' moved 0\.7.* m while settling.*mujoco==3\.3\.7"):
        env.reset()
    with pytest.raises(RuntimeError, match=r"call reset\(\)"):
        env.step(np.zeros(7))
    monkeypatch.setattr(env, "_object_positions", positions)
    monkeypatch.setattr(sim_libero, "REFERENCE_LIMIT_M", 0.0)
    assert checks.settling(env).what_to_do == 'pip install "mujoco==3.3.7"'


def test_rendering_check_passes_here():
    result = checks.gl_renders()
    assert result.ok, result.detail


def test_mujocos_warnings_reach_the_log_and_no_file(env, caplog):
    import mujoco

    model = mujoco.MjModel.from_xml_string(
        "<mujoco><worldbody><body><freejoint/><geom size='1'/></body></worldbody></mujoco>"
    )
    data = mujoco.MjData(model)
    data.qpos[0] = np.nan
    with caplog.at_level(logging.WARNING, logger="aura_ros"):
        mujoco.mj_step(model, data)
    assert "MuJoCo: " in caplog.text
    assert os.listdir() == []


@pytest.mark.slow
def test_another_process_gets_the_same_bytes_without_output_or_litter(env, tmp_path):
    program = textwrap.dedent(
        """
        import logging, os, sys
        sys.path.insert(0, sys.argv[1])
        from test_sim_libero import LiberoEnv, digest_of_episode
        env = LiberoEnv()
        digest = digest_of_episode(env)
        with LiberoEnv() as other:
            assert digest_of_episode(other) == digest, "a second environment differs"
            assert digest_of_episode(env) == digest, "a second environment spoils the first"
        assert digest_of_episode(env) == digest, "closing a second environment spoils the first"
        env.close()
        env.close()
        try:
            env.step([0] * 7)
        except RuntimeError as error:
            assert "closed" in str(error)
        else:
            sys.exit("a closed environment stepped")
        handlers = logging.getLogger().handlers + logging.getLogger("robosuite_logs").handlers
        assert not handlers, handlers
        assert "torch" not in sys.modules
        with open(sys.argv[2], "w") as out:
            out.write(digest)
        """
    )
    cwd = tmp_path / "cwd"
    cwd.mkdir()
    here = os.path.dirname(os.path.abspath(__file__))
    root = os.path.dirname(os.path.dirname(here))
    helpers = os.path.join(root, "test", "helpers")
    search_path = os.pathsep.join(filter(None, (root, helpers, os.environ.get("PYTHONPATH"))))
    run = subprocess.run(
        [sys.executable, "-c", program, here, str(tmp_path / "digest")],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": search_path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout + run.stderr == ""
    assert os.listdir(cwd) == []
    assert (tmp_path / "digest").read_text() == digest_of_episode(env)
