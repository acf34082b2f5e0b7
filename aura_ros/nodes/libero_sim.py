"""`libero_sim`: one real LIBERO episode in lockstep with a policy, over ROS topics."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from geometry_msgs.msg import PoseStamped
from rclpy.duration import Duration
from rclpy.node import Node
from rosgraph_msgs.msg import Clock
from sensor_msgs.msg import Image, JointState
from std_msgs.msg import String

from aura_ros.errors import UserError
from aura_ros.msg import ActionChunk, EpisodeStatus, GateEvent, PolicyStatus
from aura_ros.nodes import conversions, parameters, qos
from aura_ros.nodes.runtime import run
from aura_ros.nodes.sim_config import INTERRUPTED, SimNodeConfig
from aura_ros.sim import LiberoEnv, SimObservation, chunk_row_to_env
from aura_ros.sim.actions import check_env_action
from aura_ros.sim.libero import CAMERAS
from aura_ros.sim.pictures import write_picture
from aura_ros.types import LIBERO_ACTION_SPEC
from aura_ros.types import ActionChunk as Chunk

# A stamp of zero means "no time" in ROS, so simulated time begins later.
START_NS = conversions.NS
# Observations that wait for their gate event, and pictures of such that are kept.
SEEN_LATELY, MOST_PICTURES = 4, 64
ACK_TIMEOUT = Duration(seconds=1.0)


class EpisodeEndError(Exception):
    """The episode cannot go on; the message says why."""


class LiberoSim(Node):
    """Publishes cameras, joint states, end-effector pose and /clock; executes the chunk that answers them.

    Lockstep: an observation is sent again until a chunk with its stamp comes, then all rows of the chunk are
    executed and the next observation is sent. The simulation lives in a thread of its own, because LIBERO renders
    only in the thread that made it, and because callbacks must not wait for physics.
    """

    def __init__(self, **node_options: Any):
        super().__init__("libero_sim", **node_options)
        self.finished = threading.Event()
        self.exit_code = 0
        # While true, INT and TERM end the process at once: nothing was published, and LIBERO takes its time.
        self.loading = True
        self.config = parameters.declare(self, SimNodeConfig)
        self._stopping = threading.Event()
        self._news = threading.Condition()
        self._chunk: ActionChunk | None = None
        self._awaited_ns = 0
        self._epoch = 0
        self._status: PolicyStatus | None = None
        self._status_at = 0.0
        self._episode_msg = EpisodeStatus(
            suite=self.config.suite,
            task=self.config.task,
            init_state=self.config.init_state,
            seed=self.config.seed,
        )
        self._finishing = threading.Lock()
        self._queries = 0

        self._clock_pub = self.create_publisher(Clock, "/clock", qos.RELIABLE)
        self._image_pubs = {c: self.create_publisher(Image, f"images/{c}", qos.RELIABLE) for c in CAMERAS}
        self._joint_pub = self.create_publisher(JointState, "joint_states", qos.RELIABLE)
        self._pose_pub = self.create_publisher(PoseStamped, "ee_pose", qos.RELIABLE)
        self._instruction_pub = self.create_publisher(String, "instruction", qos.LATCHED)
        self._episode_pub = self.create_publisher(EpisodeStatus, "episode", qos.LATCHED)
        self.create_subscription(ActionChunk, "action_chunk", self._on_chunk, qos.RELIABLE)
        self.create_subscription(PolicyStatus, f"{self.config.policy}/status", self._on_status, qos.RELIABLE)
        if self.config.frames:
            gate = f"{self.config.policy}/gate"
            self.create_subscription(GateEvent, gate, self._on_gate, qos.RELIABLE)
        # What was seen lately, by stamp: a gate event may come after the chunk of the same step.
        self._seen: dict[int, SimObservation] = {}
        self._fired: list[int] = []
        self._pictures = 0
        self._thread = threading.Thread(target=self._live, name="simulation", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the episode if it still runs; the world hears why before the node goes."""
        self._stopping.set()
        with self._news:
            self._news.notify_all()
        self._thread.join(timeout=2.0)
        if self._episode_msg.phase == EpisodeStatus.STARTED:
            self._finish(False, INTERRUPTED)

    def _on_chunk(self, msg: ActionChunk) -> None:
        with self._news:
            if msg.epoch < self._epoch:
                self.get_logger().warning(
                    f"chunk {msg.sequence} of epoch {msg.epoch} dropped: epoch {self._epoch} has begun"
                )
                return
            self._epoch = msg.epoch
            # Another stamp: the answer to a repeated observation, which was answered already.
            if conversions.to_ns(msg.header.stamp) == self._awaited_ns:
                self._chunk = msg
                self._news.notify_all()

    def _on_status(self, msg: PolicyStatus) -> None:
        with self._news:
            self._status, self._status_at = msg, time.monotonic()
            self._news.notify_all()

    def _on_gate(self, msg: GateEvent) -> None:
        if msg.fired:
            with self._news:
                self._fired.append(conversions.to_ns(msg.header.stamp))

    # -- the simulation's thread ------------------------------------------------------------------------------

    def _live(self) -> None:
        try:
            self._run_episode()
        except UserError as mistake:
            self.get_logger().error(str(mistake))
            self.exit_code = 2
            self._finish(False, str(mistake))
        except Exception as error:
            self.get_logger().error(f"the simulation failed: {type(error).__name__}: {error}")
            self.exit_code = 1
            self._finish(False, f"{type(error).__name__}: {error}")
            raise
        finally:
            self.finished.set()

    def _run_episode(self) -> None:
        started = time.monotonic()
        with LiberoEnv(self.config.episode()) as env:
            env.reset()
            self.get_logger().info(
                f"{self.config.suite} task {self.config.task}: '{env.instruction}', built in "
                f"{time.monotonic() - started:.1f} s, at most {env.max_steps} steps"
            )
            self._begin(env)
            try:
                self._play(env)
            except EpisodeEndError as end:
                # Told here, since closing the environment takes longer than others may want to wait.
                if not self._stopping.is_set():
                    self.get_logger().error(str(end))
                    self.exit_code = 1
                self._finish(False, str(end))

    def _play(self, env: LiberoEnv) -> None:
        success = False
        observation = env.observe()
        self._picture("first", observation)
        try:
            while not success and env.step_count < env.max_steps:
                self._remember(observation)
                success = self._execute(env, self._ask(observation))
                observation = env.observe()
                self._picture_fired()
        finally:
            self._picture("last", observation)
            self._picture_fired()
        if env.saturated:
            self.get_logger().warning(
                f"{env.saturated} of {env.step_count} actions were beyond 1 controller unit and were executed as 1"
            )
        self._finish(success, "success" if success else "max_steps")

    def _picture(self, name: str, observation: SimObservation) -> None:
        """Keep what the cameras see, where that was asked for; an episode does not end for want of a picture."""
        if self.config.frames:
            path = Path(self.config.frames) / f"{name}.png"
            try:
                write_picture(path, observation.images)
            except OSError as error:
                self.get_logger().warning(f"'{path}' cannot be written ({error.strerror})")

    def _remember(self, observation: SimObservation) -> None:
        if self.config.frames:
            self._seen[START_NS + observation.stamp_ns] = observation
            while len(self._seen) > SEEN_LATELY:
                del self._seen[next(iter(self._seen))]

    def _picture_fired(self) -> None:
        """Keep what the cameras saw where the gate fired, for the first of them."""
        with self._news:
            fired, self._fired = self._fired, []
        for stamp in fired:
            seen = self._seen.get(stamp)
            if seen is not None and self._pictures < MOST_PICTURES:
                self._pictures += 1
                self._picture(f"gate-{seen.step:04d}", seen)

    def _begin(self, env: LiberoEnv) -> None:
        msg = self._episode_msg
        msg.episode = time.time_ns()
        self.loading = False
        msg.phase = EpisodeStatus.STARTED
        msg.task_name, msg.instruction, msg.max_steps = env.task_name, env.instruction, env.max_steps
        msg.header.stamp = conversions.to_time(START_NS)
        self._publish_clock(START_NS)
        self._instruction_pub.publish(String(data=env.instruction))
        self._episode_pub.publish(msg)

    def _finish(self, success: bool, reason: str) -> None:
        """Tell the end, once: the simulation's thread and `stop` may both come here."""
        msg = self._episode_msg
        with self._finishing:
            if msg.phase == EpisodeStatus.FINISHED:
                return
            msg.phase, msg.success, msg.reason = EpisodeStatus.FINISHED, success, reason
            msg.queries = self._queries
            msg.header.stamp = conversions.to_time(
                START_NS + msg.steps * round(LIBERO_ACTION_SPEC.period_s * 1e9)
            )
            self._episode_pub.publish(msg)
        self._episode_pub.wait_for_all_acked(ACK_TIMEOUT)
        self.get_logger().info(f"episode over after {msg.steps} steps: {reason}")

    def _ask(self, observation: SimObservation) -> Chunk:
        """Send an observation until a chunk answers it. Raises EpisodeEndError when none will come."""
        stamp_ns = START_NS + observation.stamp_ns
        first = observation.step == 0
        timeout = self.config.start_timeout if first else self.config.chunk_timeout
        deadline = time.monotonic() + timeout
        send_at = 0.0
        with self._news:
            self._chunk, self._awaited_ns = None, stamp_ns
        while True:
            now = time.monotonic()
            if now >= send_at:
                self._publish(observation, stamp_ns)
                send_at = now + self.config.repeat_after
            with self._news:
                self._news.wait(timeout=max(0.0, min(send_at, deadline) - time.monotonic()))
                answer, status, status_at = self._chunk, self._status, self._status_at
            if self._stopping.is_set():
                raise EpisodeEndError(INTERRUPTED)
            if answer is not None:
                self._queries += 1
                return self._accept(answer)
            self._check_policy(status, status_at, deadline, timeout, stamp_ns)

    def _check_policy(
        self, status: PolicyStatus | None, status_at: float, deadline: float, timeout: float, stamp_ns: int
    ) -> None:
        now = time.monotonic()
        if status is not None:
            if status.state == PolicyStatus.FAULT:
                raise EpisodeEndError(f"the policy has a fault: {status.reason}")
            silent = now - status_at
            if silent > self.config.policy_lost_after:
                raise EpisodeEndError(
                    f"policy lost: '{self.config.policy}' has been silent for {silent:.1f} s"
                )
        if now >= deadline:
            said = f"it says: {status.reason or 'nothing'}" if status is not None else "it was never heard of"
            raise EpisodeEndError(
                f"no chunk for stamp {stamp_ns / 1e9:.2f} s from '{self.config.policy}' in {timeout:g} s; {said}"
            )

    def _accept(self, msg: ActionChunk) -> Chunk:
        if self.count_publishers("action_chunk") > 1:
            raise EpisodeEndError(
                "more than one node publishes action_chunk here; give each run a namespace or a ROS_DOMAIN_ID of its own"
            )
        try:
            chunk = conversions.msg_to_chunk(msg, LIBERO_ACTION_SPEC.scale)
            if chunk.spec.units != LIBERO_ACTION_SPEC.units:
                raise UserError(
                    f"its units are {list(chunk.spec.units)}; allowed are {list(LIBERO_ACTION_SPEC.units)}"
                )
            # All rows before the first is executed: half a refused chunk is not executed either.
            for row in chunk.data:
                check_env_action(chunk_row_to_env(row, chunk.spec), self.config.action_limit)
        except UserError as error:
            raise EpisodeEndError(f"chunk {msg.sequence} refused: {error}") from error
        return chunk

    def _execute(self, env: LiberoEnv, chunk: Chunk) -> bool:
        period_wall = 1.0 / self.config.rate if self.config.rate else 0.0
        due = time.monotonic()
        for row in chunk.data:
            if env.step_count >= env.max_steps:
                break
            if self._stopping.is_set():
                raise EpisodeEndError(INTERRUPTED)
            result = env.step(chunk_row_to_env(row, chunk.spec))
            self._episode_msg.steps = env.step_count
            self._publish_clock(START_NS + env.step_count * round(env.control_period_s * 1e9))
            if result.success:
                return True
            due += period_wall
            self._stopping.wait(max(0.0, due - time.monotonic()))
        return False

    # -- out ------------------------------------------------------------------------------------------------------

    def _publish_clock(self, stamp_ns: int) -> None:
        self._clock_pub.publish(Clock(clock=conversions.to_time(stamp_ns)))

    def _publish(self, observation: SimObservation, stamp_ns: int) -> None:
        self._publish_clock(stamp_ns)
        for camera, pixels in observation.images.items():
            self._image_pubs[camera].publish(
                conversions.rgb_to_image(pixels, stamp_ns, f"{camera}_optical_frame")
            )
        joints = JointState(name=list(observation.joint_names))
        joints.header.stamp = conversions.to_time(stamp_ns)
        joints.position = observation.joint_positions.tolist()
        joints.velocity = observation.joint_velocities.tolist()
        self._joint_pub.publish(joints)
        pose = PoseStamped()
        pose.header.stamp, pose.header.frame_id = joints.header.stamp, "world"
        p, q = pose.pose.position, pose.pose.orientation
        p.x, p.y, p.z = observation.ee_position.tolist()
        q.x, q.y, q.z, q.w = observation.ee_quaternion.tolist()
        self._pose_pub.publish(pose)


def main() -> None:
    """Run one episode and exit: 0 when it ran to its end, 1 when it could not, 2 for a user's mistake."""
    run(LiberoSim, "libero_sim")
