"""`policy_node`: the lifecycle node around backbone, memory and policy."""

from __future__ import annotations

import array
import dataclasses
import math
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any

from diagnostic_msgs.msg import DiagnosticArray
from rclpy.lifecycle import LifecycleState, TransitionCallbackReturn
from rclpy.qos import DurabilityPolicy
from std_msgs.msg import Float64, String, UInt64

from aura_ros import __version__
from aura_ros.errors import UserError
from aura_ros.msg import ActionChunk, ChunkState, EpisodeStatus, GateEvent, Latent, PolicyInfo, PolicyStatus
from aura_ros.nodes import conversions, parameters, qos, status
from aura_ros.nodes.observation_inputs import ObservationInputs, ProprioSource
from aura_ros.nodes.policy_config import PolicyNodeConfig
from aura_ros.nodes.policy_services import PolicyServices
from aura_ros.nodes.policy_worker import PolicyWorker
from aura_ros.nodes.runtime import Log, run
from aura_ros.nodes.stepped import Restored, Stepped

if TYPE_CHECKING:
    from aura_ros.policy import Policy

HEARTBEAT_S = 0.2
DIAGNOSTICS_EVERY = 5  # heartbeats: 1 Hz


class PolicyNode(PolicyServices):
    """Newest camera frames, proprioception and instruction in; action chunk, gate events and status out.

    configure loads the backbone and the memory, activate warms them up; see `PolicyNodeConfig` for the parameters.
    Raises UserError at construction for a parameter that cannot be right.
    """

    def __init__(self, **node_options: Any):
        super().__init__("policy_node", **node_options)
        self.finished = threading.Event()
        self.exit_code = 0
        # While true, INT and TERM end the process at once: nothing moves yet, and loading may take minutes.
        self.loading = False
        self._heard_by_recorder = True
        self.config = parameters.declare(self, PolicyNodeConfig)
        self._sources = tuple(ProprioSource.parse(text) for text in self.config.proprio__sources)
        self._inputs: ObservationInputs | None = None
        self._problem = ""
        self._stop = threading.Event()

        self._chunk_pub = self.create_publisher(ActionChunk, "action_chunk", qos.RELIABLE)
        self._gate_pub = self.create_publisher(GateEvent, "~/gate", qos.RELIABLE)
        self._rate_pub = self.create_publisher(Float64, "~/write_rate", qos.RELIABLE)
        self._bytes_pub = self.create_publisher(UInt64, "~/state_bytes", qos.RELIABLE)
        self._status_pub = self.create_publisher(PolicyStatus, "~/status", qos.RELIABLE)
        self._info_pub = self.create_publisher(PolicyInfo, "~/info", qos.LATCHED)
        self._diagnostics_pub = self.create_publisher(DiagnosticArray, "/diagnostics", qos.RELIABLE)
        self._latent_pub = (
            self.create_publisher(Latent, "~/latent", qos.RELIABLE) if self.config.publish_latent else None
        )
        self.create_subscription(String, "instruction", self._on_instruction, qos.LATCHED)
        self.create_subscription(EpisodeStatus, "episode", self._on_episode, qos.LATCHED)
        self.create_subscription(ChunkState, "chunk_state", self._on_chunk_state, qos.SENSOR)
        parameters.watch(self, PolicyNodeConfig, lambda: self.config, self._apply)
        # Messages on latched topics may come before the worker exists.
        self._instruction = self.config.instruction
        self._episode: EpisodeStatus | None = None
        self._heartbeat = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._heartbeat.start()

    # -- lifecycle ------------------------------------------------------------------------------------------

    def on_configure(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Load backbone and memory; on failure free what was taken and stay unconfigured."""
        self.loading = True
        try:
            self._configure()
        except Exception as error:
            self._report("configure failed", error)
            self._free()
            if self.config.exit_on_configure_failure:
                self.exit_code = 2 if isinstance(error, UserError) else 1
                self.finished.set()
            return TransitionCallbackReturn.FAILURE
        finally:
            self.loading = False
        self._problem = ""
        return super().on_configure(state)

    def on_activate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Warm the model up, then look at observations. The warm-up enters neither memory nor statistics."""
        assert self.worker is not None
        self.loading = True
        try:
            self.worker.warm_up()
            saved = self.worker.read_saved()
        except Exception as error:
            self._report("start-up check failed", error)
            return TransitionCallbackReturn.FAILURE
        finally:
            self.loading = False
        self._heard_by_recorder = not self.config.wait_for_recorder
        self._problem = ""
        if self.config.shadow:
            self.get_logger().info("shadow: chunks are inferred, and none is published")
        self.worker.set_active(True, saved)
        return super().on_activate(state)

    def on_deactivate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Stop inferring; a chunk in flight is discarded."""
        assert self.worker is not None
        self._run.close("deactivated")
        self.worker.set_active(False)
        return super().on_deactivate(state)

    def on_cleanup(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Free the model."""
        self._free()
        return super().on_cleanup(state)

    def on_shutdown(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Free the model and end the process."""
        self._free()
        self.finished.set()
        return super().on_shutdown(state)

    def _configure(self) -> None:
        config = self.config
        config.check_files()
        # torch and transformers are imported here, when first needed.
        from aura_ros.policy import load_policy

        started = time.perf_counter()
        policy = load_policy(
            backbone=config.backbone,
            checkpoint=config.checkpoint or None,
            device=config.device,
            dtype=config.dtype,
            unnorm_key=config.unnorm_key or None,
            seed=config.seed,
            options=config.folder_options(),
            accelerate=config.accelerate,
            torch_threads=config.torch_threads,
            memory_checkpoint=config.memory__checkpoint or None,
            memory_state_dim=config.memory__state_dim,
            memory_step_period=config.memory_step_period or None,
            action_limit=config.action_limit,
        )
        try:
            self._attach(policy)
        except Exception:
            policy.close()
            raise
        info, memory = policy.backbone.info, policy.memory
        weights = "trained" if info.trained else "seeded random weights: its actions mean nothing"
        self.get_logger().info(
            f"backbone {info.name} ({info.checkpoint}, {info.parameters / 1e6:.1f} M parameters, {info.details}, "
            f"{weights}), memory {memory.config.variant.value} of {memory.state_bytes} bytes "
            f"({policy.memory_checkpoint or 'untrained'}), loaded in {time.perf_counter() - started:.1f} s"
        )

    def _attach(self, policy: Policy) -> None:
        """Subscribe to what the policy needs and start its worker."""
        config, info = self.config, policy.backbone.info
        dim = sum(source.dim for source in self._sources)
        if dim != info.proprio_dim:
            raise UserError(
                f"proprio.sources make {dim} values, but backbone '{info.name}' was trained on {info.proprio_dim}; "
                "list the parts it was trained on, in order"
            )
        self._inputs = ObservationInputs(
            self,
            info.cameras,
            self._sources,
            config.proprio__orientation_reference,
            config.image_transport == "compressed",
            qos.NEWEST_RELIABLE if config.mode == "lockstep" else qos.SENSOR,
            time.monotonic_ns,
        )
        self.worker = PolicyWorker(
            policy,
            self._inputs,
            config,
            publish=self._publish,
            repeat=self._repeat,
            listening=self._recorder_listens,
            on_epoch=self._publish_info,
            now_ns=self._now_ns,
            log=Log(self.get_logger()),
        )
        if self._instruction:
            self.worker.set_instruction(self._instruction)
        if self._episode is not None:
            self._on_episode(self._episode)
        self._hold_emergency_stop()
        self.worker.start()

    def _report(self, what: str, error: Exception) -> None:
        if isinstance(error, UserError):
            self._problem = str(error)
            self.get_logger().error(f"{what}: {error}")
        else:
            self._problem = " ".join(f"{type(error).__name__}: {error}".split())
            self.get_logger().error(f"{what}\n{traceback.format_exc()}")

    def _free(self) -> None:
        self._run.close("the model was freed")
        if self.worker is not None:
            self.worker.stop()
            self.worker.policy.backbone.close()
            self.worker = None
        if self._inputs is not None:
            self._inputs.close()
            self._inputs = None

    def stop(self) -> None:
        """Withhold chunks, say so, and end the threads."""
        if self._run.running and self.executor is not None:
            self._run.close("stopping")
            for _ in range(3):  # the first may only end a wait that was begun: let the goal's result leave
                self.executor.spin_once(timeout_sec=0.0)
        if self.worker is not None and self.worker.active:
            self.worker.set_active(False)
        self._problem = self._problem or "stopping"
        self._publish_status(self.worker)
        self._stop.set()
        self._heartbeat.join(timeout=1.0)
        self._free()

    def destroy_node(self) -> None:
        """Leave the graph at once: rclpy keeps a lifecycle node visible until its state machine is collected."""
        super().destroy_node()
        self._state_machine.destroy_when_not_in_use()

    # -- in: each callback stores and returns ----------------------------------------------------------------

    def _on_instruction(self, msg: String) -> None:
        self._instruction = msg.data
        # While a goal of run_policy is under way its instruction stands; this one is taken when it ends.
        if self.worker is not None and not self._run.running:
            self.worker.set_instruction(msg.data)

    def _on_chunk_state(self, msg: ChunkState) -> None:
        if self.worker is not None:
            self.worker.realtime.player_reports(msg.epoch, msg.rows_left)

    def _on_episode(self, msg: EpisodeStatus) -> None:
        self._episode = msg
        if self.worker is None:
            return
        if msg.phase == EpisodeStatus.STARTED:
            stamp_ns = conversions.to_ns(msg.header.stamp)
            self.worker.episode_started(stamp_ns, msg.episode, msg.suite, msg.task, msg.init_state, msg.seed)
        elif msg.phase == EpisodeStatus.FINISHED:
            self.worker.episode_finished()

    def _apply(self, config: PolicyNodeConfig) -> None:
        if self.worker is not None:
            self.worker.apply(config)
            self._publish_info()
        for name in (spec.name for spec in dataclasses.fields(config)):
            before, after = getattr(self.config, name), getattr(config, name)
            if before != after:
                self.get_logger().info(f"{parameters.ros_name(name)}: {before} -> {after}")
        self.config = config

    # -- out --------------------------------------------------------------------------------------------------

    def _now_ns(self) -> int:
        return int(self.get_clock().now().nanoseconds)

    def _publish(self, result: Stepped, send_chunk: bool) -> ActionChunk | None:
        """Publish one memory step; the chunk goes last, because the simulator moves on when it has it."""
        period_s = self.worker.step_ns / conversions.NS if self.worker is not None else math.inf
        gate = status.gate_event(result, period_s)
        self._gate_pub.publish(gate)
        self._rate_pub.publish(Float64(data=result.write_rate))
        self._bytes_pub.publish(UInt64(data=result.state_bytes))
        if self._latent_pub is not None:
            latent = Latent(header=gate.header, epoch=result.epoch, step=result.steps)
            latent.data = array.array("f", result.hidden_state.tobytes())
            self._latent_pub.publish(latent)
        if result.chunk is None:
            return None
        chunk = conversions.chunk_to_msg(result.chunk, result.epoch, result.sequence, self._now_ns())
        if send_chunk:
            self._chunk_pub.publish(chunk)
        return chunk

    def _repeat(self, answered: ActionChunk | Restored) -> None:
        """Send what a stamp was answered with again."""
        if isinstance(answered, Restored):
            answered = conversions.chunk_to_msg(
                answered.chunk, answered.epoch, answered.sequence, self._now_ns()
            )
        self._chunk_pub.publish(answered)

    def _recorder_listens(self) -> bool:
        """Whether the recorder is matched on both topics; once it was, it may also go."""
        if self._heard_by_recorder:
            return True
        for publisher in (self._gate_pub, self._chunk_pub):
            endpoints = [
                e
                for e in self.get_subscriptions_info_by_topic(publisher.topic_name)
                # One that wants old messages never matches a volatile publisher.
                if e.qos_profile.durability != DurabilityPolicy.TRANSIENT_LOCAL
            ]
            listed = any(e.node_name == self.config.wait_for_recorder for e in endpoints)
            # The graph knows a node before the publisher's own match; all matched means this one too.
            if not listed or publisher.get_subscription_count() < len(endpoints):
                return False
        self._heard_by_recorder = True
        return True

    def _publish_info(self) -> None:
        worker = self.worker
        if worker is not None and worker.active:
            msg = status.policy_info(worker, __version__)
            msg.header.stamp = self.get_clock().now().to_msg()
            self._info_pub.publish(msg)

    def _beat(self) -> None:
        """Heartbeat and diagnostics, from a thread of their own on the steady clock."""
        beats = 0
        while not self._stop.wait(HEARTBEAT_S):
            worker = self.worker
            try:
                msg, name = self._publish_status(worker), self.get_fully_qualified_name()
                if beats % DIAGNOSTICS_EVERY == 0:
                    self._diagnostics_pub.publish(status.diagnostics(name, msg, status.timings(worker)))
            except Exception:
                if self._stop.is_set() or not self.context.ok():
                    return  # the node is being destroyed
                raise
            beats += 1

    def _publish_status(self, worker: PolicyWorker | None) -> PolicyStatus:
        now = self.get_clock().now()
        msg = status.policy_status(worker, self._problem, now.nanoseconds)
        msg.header.stamp = now.to_msg()
        self._status_pub.publish(msg)
        return msg


def main() -> None:
    """Run the node until INT, TERM or a shutdown transition."""
    run(PolicyNode, "policy_node")


__all__ = ["PolicyNode", "main"]
