"""What the policy node says of itself: status, diagnostics, info."""

from __future__ import annotations

import time

from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus, KeyValue

from aura_ros.msg import GateEvent, PolicyInfo, PolicyStatus
from aura_ros.nodes.conversions import to_duration, to_time
from aura_ros.nodes.policy_worker import PolicyWorker
from aura_ros.nodes.stepped import Stepped

BETWEEN_OBSERVATIONS_S = 2.0
STATE_NAMES = {
    PolicyStatus.UNCONFIGURED: "unconfigured",
    PolicyStatus.INACTIVE: "inactive",
    PolicyStatus.WAITING: "waiting",
    PolicyStatus.RUNNING: "running",
    PolicyStatus.HOLDING: "holding",
    PolicyStatus.DISABLED: "disabled",
    PolicyStatus.FAULT: "fault",
}
LEVELS = {
    PolicyStatus.RUNNING: DiagnosticStatus.OK,
    PolicyStatus.INACTIVE: DiagnosticStatus.OK,
    PolicyStatus.DISABLED: DiagnosticStatus.OK,
    PolicyStatus.FAULT: DiagnosticStatus.ERROR,
}


def policy_status(worker: PolicyWorker | None, problem: str, now_ns: int) -> PolicyStatus:
    """The heartbeat's content; the caller stamps it."""
    msg = PolicyStatus()
    if worker is None:
        msg.state, msg.reason = PolicyStatus.UNCONFIGURED, problem
        return msg
    msg.state, msg.reason = _state(worker, problem)
    msg.epoch, msg.queries, msg.repeats = worker.epoch, worker.queries, worker.repeats
    msg.inference_p50_ms, msg.inference_p95_ms, msg.inference_p99_ms = worker.latency_ms.percentiles(
        50, 95, 99
    )
    ages = worker.inputs.streams.ages_ms(now_ns)
    msg.streams, msg.stream_age_ms = list(ages), list(ages.values())
    rejected = worker.rejections.items()
    msg.rejected_reasons = [reason for reason, _ in rejected]
    msg.rejected_counts = [count for _, count in rejected]
    msg.queue_depth = worker.realtime.queue_depth(worker.epoch)
    return msg


def _state(worker: PolicyWorker, problem: str) -> tuple[int, str]:
    if not worker.active:
        return PolicyStatus.INACTIVE, problem or worker.fault
    if worker.fault:
        return PolicyStatus.FAULT, worker.fault
    if not worker.enabled:
        return PolicyStatus.DISABLED, "call ~/enable"
    hold = worker.hold
    # In lockstep the simulator executes a chunk between two observations: that is no lack of any.
    between = hold.missing and time.monotonic() - worker.answered_at < BETWEEN_OBSERVATIONS_S
    if hold.reason and not between:
        return (PolicyStatus.WAITING if hold.missing else PolicyStatus.HOLDING), hold.reason
    return PolicyStatus.RUNNING, ""


def timings(worker: PolicyWorker | None) -> dict[str, float]:
    """What the node itself costs, milliseconds: callbacks, and a query beside its inference."""
    if worker is None:
        return {}
    overhead, callback = worker.overhead_ms.percentiles(50, 99), worker.inputs.callback_ms.percentiles(50, 99)
    names = ("overhead_ms p50", "overhead_ms p99", "callback_ms p50", "callback_ms p99")
    return {name: round(value, 3) for name, value in zip(names, (*overhead, *callback), strict=True)}


def diagnostics(node_name: str, status: PolicyStatus, costs: dict[str, float]) -> DiagnosticArray:
    """The heartbeat for `/diagnostics` and its aggregators; costs: as `timings` has them."""
    state = STATE_NAMES[status.state]
    entry = DiagnosticStatus(
        level=LEVELS.get(status.state, DiagnosticStatus.WARN),
        name=f"{node_name.lstrip('/')}: policy",
        message=f"{state}: {status.reason}" if status.reason else state,
        hardware_id=node_name,
    )
    values: list[tuple[str, object]] = [
        ("epoch", status.epoch),
        ("queries", status.queries),
        ("repeats", status.repeats),
        ("queue_depth", status.queue_depth),
        ("inference_p50_ms", round(status.inference_p50_ms, 3)),
        ("inference_p95_ms", round(status.inference_p95_ms, 3)),
        ("inference_p99_ms", round(status.inference_p99_ms, 3)),
        *costs.items(),
    ]
    values += [
        (f"age_ms {n}", round(a, 1)) for n, a in zip(status.streams, status.stream_age_ms, strict=True)
    ]
    values += [
        (f"rejected {r}", c) for r, c in zip(status.rejected_reasons, status.rejected_counts, strict=True)
    ]
    entry.values = [KeyValue(key=key, value=str(value)) for key, value in values]
    msg = DiagnosticArray(status=[entry])
    msg.header.stamp = status.header.stamp
    return msg


def policy_info(worker: PolicyWorker, package_version: str) -> PolicyInfo:
    """What the policy is; the caller stamps it."""
    backbone, memory = worker.policy.backbone.info, worker.policy.memory
    spec = backbone.action
    return PolicyInfo(
        epoch=worker.epoch,
        package_version=package_version,
        backbone=backbone.name,
        checkpoint=backbone.checkpoint,
        checkpoint_hash=backbone.checkpoint_hash,
        trained=backbone.trained,
        hidden_dim=backbone.hidden_dim,
        backbone_parameters=backbone.parameters,
        cameras=list(backbone.cameras),
        image_rotation=backbone.image_rotation,
        memory_variant=memory.config.variant.value,
        memory_checkpoint=worker.policy.memory_checkpoint or f"untrained:seed={memory.config.seed}",
        memory_hash=memory.weights_hash,
        dk=memory.config.dk,
        dv=memory.config.dv,
        state_bytes=memory.state_bytes,
        gate_threshold=float(memory.threshold),
        memory_step_period=memory.config.memory_step_period,
        control_mode=int(spec.control_mode),
        names=list(spec.names),
        units=list(spec.units),
        action_scale=[float(s) for s in spec.scale],
        period=to_duration(spec.period_s),
        horizon=spec.horizon,
    )


def gate_event(result: Stepped, period_s: float) -> GateEvent:
    """One memory step as a message; period_s: seconds between memory steps."""
    memory_step = result.memory_step
    gate = GateEvent()
    gate.header.stamp = to_time(result.stamp_ns)
    gate.header.frame_id = result.frame_id
    gate.epoch, gate.step, gate.sequence = result.epoch, result.steps, result.sequence
    gate.fired, gate.probability = bool(memory_step.fired), float(memory_step.probability)
    gate.threshold = float(memory_step.threshold)
    gate.surprise = float(memory_step.surprise)
    gate.surprise_normalized = float(memory_step.surprise_normalised)
    gate.writes, gate.steps = result.writes, result.steps
    gate.write_rate, gate.writes_per_second = result.write_rate, result.write_rate / period_s
    gate.bytes_written, gate.state_bytes = int(memory_step.written_bytes), result.state_bytes
    gate.state_norm = float(result.state_norm)
    return gate
