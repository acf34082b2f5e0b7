"""One LIBERO episode as a robot would show it: true-view cameras, joints, poses; checked actions in."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from aura_ros.errors import UserError
from aura_ros.geometry import GRIPPER_DOWN_XYZW, quaternion_to_axis_angle
from aura_ros.sim import runtime
from aura_ros.sim.actions import check_env_action, is_saturated
from aura_ros.sim.displaced import displace
from aura_ros.sim.draws import Draws, global_generator
from aura_ros.sim.hold import Hold, tinted
from aura_ros.sim.instruction import tell
from aura_ros.sim.official import official_bddl_file, official_init_states, official_task
from aura_ros.sim.runtime import SetupError
from aura_ros.sim.suites import EPISODE, EpisodeConfig, EpisodeVoidError
from aura_ros.types import FloatArray, ImageArray

CONTROL_PERIOD_S = 0.05
CONTROL_PERIOD_NS = 50_000_000
# How far an object may move while it settles. In the reference episode all stay below 0.05 m with the
# right MuJoCo, and fly about half a metre with a wrong one. Elsewhere the official states drop pans and
# bowls and let boxes fall over, by up to 0.16 m, which is no fault.
REFERENCE_EPISODE = ("libero_10", 0, 0)
REFERENCE_LIMIT_M = 0.06
FLYING_LIMIT_M = 0.3
PLACEMENT_TRIES = 20

CAMERAS = {"agentview": "agentview", "wrist": "robot0_eye_in_hand"}
JOINT_NAMES = (
    *(f"panda_joint{i}" for i in range(1, 8)),
    "panda_finger_joint1",
    "panda_finger_joint2",
)
_SETTLE_ACTION = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0)

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SimObservation:
    """What the robot shows at one step. Positions and poses are in the simulator's world frame.

    The numbers are LIBERO's own observation, which robosuite samples 2 ms (joints) and 4 ms (hand) before
    the end of a control step; policies were trained on these.

    images: "agentview" and "wrist", uint8 [H, W, 3] RGB, the true view: row 0 is the top, not mirrored
        (MuJoCo's buffer is bottom-up). OpenVLA-OFT's LIBERO checkpoints mirror it themselves.
    joint_names: `JOINT_NAMES`, 7 arm joints and 2 fingers.
    joint_positions, joint_velocities: float64 [9]; rad and rad/s, fingers m and m/s. robosuite's second
        finger moves along the negative axis: open is about +0.04 and -0.04.
    ee_position: float64 [3], m, the grip site (robosuite's robot0_eef_pos).
    ee_quaternion: float64 [4], x, y, z, w, the hand (robosuite's robot0_eef_quat), in MuJoCo's own sign.
    gripper_qpos: float64 [2], m, the two fingers.
    sim_time_s: seconds since the first observation of the episode: step x 0.05.
    step: control steps since then.
    """

    images: dict[str, ImageArray]
    joint_names: tuple[str, ...]
    joint_positions: npt.NDArray[np.float64]
    joint_velocities: npt.NDArray[np.float64]
    ee_position: npt.NDArray[np.float64]
    ee_quaternion: npt.NDArray[np.float64]
    gripper_qpos: npt.NDArray[np.float64]
    sim_time_s: float
    step: int

    @property
    def stamp_ns(self) -> int:
        """`sim_time_s` in whole nanoseconds, exact."""
        return self.step * CONTROL_PERIOD_NS


@dataclass(frozen=True)
class StepResult:
    """What one control step led to.

    success: the task's goal holds (LIBERO's done flag).
    done: the episode is over, by success or by its step limit.
    reward: 1.0 on success, else 0.0, as LIBERO gives it.
    """

    success: bool
    done: bool
    reward: float


def proprio(observation: SimObservation) -> FloatArray:
    """Proprioception as OpenVLA-OFT's LIBERO checkpoints take it.

    Returns:
        float32 [8]: hand position (3, m), axis-angle (3, rad; the branch around the gripper pointing
        down, see `aura_ros.geometry`), gripper finger positions (2, m). Not normalised.
    """
    rotation = quaternion_to_axis_angle(observation.ee_quaternion, GRIPPER_DOWN_XYZW)
    parts = (observation.ee_position, rotation, observation.gripper_qpos)
    return np.concatenate(parts).astype(np.float32)


class LiberoEnv:
    """A LIBERO task, built once (about 10 s), run for any number of episodes.

    Build, observe and render in one thread: the GL context belongs to the thread that built it, and
    another would get black frames without an error, so it gets a RuntimeError here.

        with LiberoEnv(EpisodeConfig(task=0)) as env:
            env.reset()
            observation = env.observe()
            result = env.step(action)

    Attributes:
        config: the episode's configuration, with the last reset's initial state and seed.
        instruction, task_name: from LIBERO's task; with `config.instruction_of` the instruction of that one.
        max_steps, control_period_s: the episode's limit, a cue task's hold included, and 0.05 s.
        hold: when objects are lit and the arm is held; never outside cue tasks.
        step_count: control steps since the first observation.
        saturated: how many actions of this episode had an arm delta between 1 controller unit, where
            robosuite's controller clips, and the configured limit.
        settled_displacement_m: the farthest any object moved while settling.
    """

    control_period_s = CONTROL_PERIOD_S

    def __init__(self, config: EpisodeConfig | None = None) -> None:
        """Build the environment.

        Raises:
            SetupError: LIBERO, OSMesa or the right MuJoCo is missing, or its files are incomplete; the
                message says what to type.
        """
        self.config = config or EpisodeConfig()
        # Everything that can be refused cheaply is, before the ten seconds of building.
        runtime.require_mujoco_version()
        task = official_task(self.config)
        self.task_name: str = task.name
        self.max_steps = self.config.step_limit
        self.step_count = 0
        self.saturated = 0
        self.settled_displacement_m = 0.0
        self._init_states = official_init_states(self.config)
        self._thread = threading.get_ident()
        self._running = False
        self._observation: dict[str, Any] = {}
        bddl_file = official_bddl_file(self.config)
        environment = runtime.load_environment_class()
        self._draws = Draws()
        with global_generator(self.config.seed):
            self._env: Any = environment(
                bddl_file_name=str(bddl_file),
                use_camera_obs=False,  # frames are rendered on demand; a render costs 15 steps
                hard_reset=False,
                ignore_done=True,  # settling counts as steps there; `step_count` is what ends an episode
            )
        runtime.release_gl()
        self.hold = Hold(self)
        self._own_goal = self.domain.parsed_problem["goal_state"]
        self.instruction = tell(self.config, self.domain, self._own_goal)

    def reset(
        self,
        init_state: int | None = None,
        seed: int | None = None,
        displaced: int | None = None,
        instruction_of: int | None = None,
        resets: int | None = None,
    ) -> None:
        """`begin` of this environment's configuration; None keeps its value. Raises UserError for one out of range."""
        given = (init_state, seed, displaced, instruction_of, resets)
        changes: Any = {name: value for name, value in zip(EPISODE, given, strict=False) if value is not None}
        self.begin(replace(self.config, **changes))

    def begin(self, config: EpisodeConfig) -> None:
        """Start an episode: seed, reset, set the official initial state, let it settle.

        The official states do not hold the poses of fixtures (cabinets, stoves); robosuite draws those
        from NumPy's global generator at every reset. It is therefore seeded here before each reset, so
        that an episode depends on its own configuration only and not on those before it, and put back
        afterwards. OpenVLA-OFT's evaluation seeds once a task: its k-th trial is `resets=k`.

        Args:
            config: of this episode and later ones; it may differ from the environment's own in the fields of `EPISODE`.

        Raises:
            UserError: an object or task that this scene does not have.
            SetupError: an object moved as it only does under a wrong MuJoCo.
            EpisodeVoidError: no placement or arrangement of the objects was found.
            RuntimeError: the environment is closed.
        """
        env = self._open_env()
        self.want(config)
        self._running = False
        self._draws.reset(self._place, config.seed, config.resets)
        # robosuite's soft reset keeps the gripper's ramp from the last episode.
        for robot in env.robots:
            robot.gripper.current_action = np.zeros(robot.gripper.dof)
        self._observation = env.set_init_state(self._init_states[self.config.init_state])
        before = self._object_positions()
        self.settle()
        self._check_settled(before)
        if self.config.displaced:
            displace(self)
        self.hold = Hold(self)
        self.max_steps = config.step_limit + self.hold.schedule.held
        self.step_count = 0
        self.saturated = 0
        self._running = True

    def want(self, config: EpisodeConfig) -> None:
        """Take instruction and goal from a configuration, and leave everything else as it is. Raises UserError."""
        self.instruction = tell(config, self.domain, self._own_goal)
        self.config = config

    def settle(self) -> None:
        """Let `config.settle_steps` control steps pass with the gripper open and the arm at rest; they are not counted."""
        env = self._open_env()
        for _ in range(self.config.settle_steps):
            self._observation = env.step(list(_SETTLE_ACTION))[0]

    def step(self, action: npt.ArrayLike) -> StepResult:
        """Execute one action for one control period (0.05 s).

        Args:
            action: [7], controller units (see `aura_ros.sim.actions`): position and rotation deltas, then the
                gripper, -1 opens and +1 closes. Arm deltas up to `config.action_limit` pass; the
                controller clips them at 1, which `saturated` counts.

        Raises:
            ActionError: not seven finite numbers within the limit; nothing was executed.
            RuntimeError: no episode is running (before `reset`, after its end, after `close`).
            EpisodeVoidError: the physics diverged.

        In the hold of a cue task (see `aura_ros.sim.cues`) the action is checked, and the arm's sweep executed in its place.
        """
        checked = check_env_action(action, self.config.action_limit)
        return self.execute(self.hold.sweep(self) if self.held else checked)

    @property
    def held(self) -> bool:
        """Whether the next step is one of the hold: what is asked for is not done."""
        return self.step_count < self.hold.schedule.held

    def execute(self, action: npt.ArrayLike) -> StepResult:
        """As `step`, hold or not."""
        env = self._open_env()
        if not self._running:
            raise RuntimeError("no LIBERO episode is running (it is over, or never began): call reset()")
        checked = check_env_action(action, self.config.action_limit)
        time_before = float(env.sim.data.time)
        self._observation, reward, success, _ = env.step(checked)
        # On a NaN MuJoCo resets itself to the model's default state and goes on.
        if not float(env.sim.data.time) > time_before:
            self._running = False
            raise EpisodeVoidError(
                f"the physics diverged at step {self.step_count} and MuJoCo reset itself: "
                "the episode is void, call reset()"
            )
        self.step_count += 1
        self.saturated += is_saturated(checked)
        self._running = not success and self.step_count < self.max_steps
        return StepResult(success=bool(success), done=not self._running, reward=float(reward))

    def observe(self) -> SimObservation:
        """The current observation; both cameras are rendered, and only here and in `render`.

        Raises:
            RuntimeError: before the first `reset`, after `close`, from another thread than the one that
                built the environment, or a black frame.
        """
        if not self._observation:
            raise RuntimeError("there is nothing to observe yet: call reset()")
        images = {name: self.render(name) for name in CAMERAS}
        raw = self._observation
        robot = "robot0_"
        return SimObservation(
            images=images,
            joint_names=JOINT_NAMES,
            joint_positions=np.concatenate((raw[robot + "joint_pos"], raw[robot + "gripper_qpos"])),
            joint_velocities=np.concatenate((raw[robot + "joint_vel"], raw[robot + "gripper_qvel"])),
            ee_position=np.array(raw[robot + "eef_pos"], dtype=np.float64),
            ee_quaternion=np.array(raw[robot + "eef_quat"], dtype=np.float64),
            gripper_qpos=np.array(raw[robot + "gripper_qpos"], dtype=np.float64),
            sim_time_s=self.step_count * CONTROL_PERIOD_NS / 1e9,
            step=self.step_count,
        )

    def render(self, camera: str) -> ImageArray:
        """One camera's true view, uint8 [image_size, image_size, 3] RGB, row 0 at the top.

        Args:
            camera: "agentview" or "wrist".

        Raises:
            UserError: an unknown camera.
            RuntimeError: from another thread than the one that built the environment, after `close`, or
                a black frame.
        """
        env = self._open_env()
        if camera not in CAMERAS:
            raise UserError(f"camera '{camera}' is unknown; choose one of {', '.join(CAMERAS)}")
        if threading.get_ident() != self._thread:
            raise RuntimeError(
                "LIBERO can only render in the thread that built the environment; "
                f"'{threading.current_thread().name}' is another: build and observe in one thread"
            )
        size = self.config.image_size
        lit = self.hold.schedule.lit(self.step_count)
        with runtime.current_gl(env.sim._render_context_offscreen.gl_ctx), tinted(self.domain, lit):
            raw = env.sim.render(camera_name=CAMERAS[camera], width=size, height=size)
        if not raw.any():
            raise RuntimeError(
                f"camera '{camera}' rendered a black frame: off-screen rendering does not work here"
            )
        return np.ascontiguousarray(raw[::-1])

    @property
    def domain(self) -> Any:
        """LIBERO's own environment below (a robosuite `BDDLBaseDomain`): `.sim`, `.robots`, objects and goals.

        Raises:
            RuntimeError: after `close`.
        """
        return self._open_env().env

    def bookkeeping(self, put: dict[str, Any] | None = None) -> dict[str, Any]:
        """What an episode counts beside the simulation's state; put: set it, as a relabelling does that went ahead."""
        names = ("step_count", "saturated", "_running", "_observation")
        for name, value in (put or {}).items():
            setattr(self, name, value)
        return {name: getattr(self, name) for name in names}

    def close(self) -> None:
        """Free the simulation and its GL context. Safe to call twice."""
        self._running = False
        if self._env is not None:
            with runtime.current_gl(self._env.sim._render_context_offscreen.gl_ctx):
                self._env.close()
            self._env = None

    def __enter__(self) -> LiberoEnv:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open_env(self) -> Any:
        if self._env is None:
            raise RuntimeError("this LIBERO environment is closed: build a new one")
        return self._env

    def _place(self) -> None:
        """Reset the simulation and draw the placements, again where robosuite finds no room for them.

        LIBERO's own wrapper does this with a loop that swallows every exception, Ctrl-C included, and so
        never ends once a reset fails for another reason.
        """
        for _ in range(PLACEMENT_TRIES):
            try:
                self._env.env.reset()
                return
            except runtime.randomization_error():
                continue
        raise EpisodeVoidError(
            f"no placement of the objects found in {PLACEMENT_TRIES} tries: try another seed"
        )

    def _object_positions(self) -> dict[str, npt.NDArray[np.float64]]:
        """World position of every object and fixture, float64 [3], m."""
        domain = self._env.env
        return {
            name: np.array(domain.sim.data.body_xpos[body], dtype=np.float64)
            for name, body in domain.obj_body_id.items()
        }

    def _check_settled(self, before: dict[str, npt.NDArray[np.float64]]) -> None:
        after = self._object_positions()
        moved = {name: float(np.linalg.norm(after[name] - before[name])) for name in before}
        name = max(moved, key=lambda key: moved[key])
        self.settled_displacement_m = moved[name]
        episode = (self.config.suite, self.config.task, self.config.init_state)
        limit = REFERENCE_LIMIT_M if episode == REFERENCE_EPISODE else FLYING_LIMIT_M
        # Not `>=`: a NaN must fail too.
        if not all(distance < limit for distance in moved.values()):
            raise SetupError(
                f"object '{name}' moved {moved[name]:.3f} m while settling; allowed is below {limit} m, "
                "so this machine's physics is wrong",
                runtime.INSTALL_MUJOCO,
            )
        _logger.debug("settled: %s moved most, %.4f m", name, moved[name])
