"""Collect one demonstration on real LIBERO: the expert drives, or a policy does and the expert says what to do instead.

Pushes that are not recorded lead the expert off its path, so that recoveries are seen (DART, Laskey et al. 2017).
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from aura_ros.backbones.openvla_oft.config import EMBEDDED
from aura_ros.backbones.openvla_oft.processing import encode_jpeg
from aura_ros.memory.config import UNTRAINED
from aura_ros.sim.libero import CAMERAS, CONTROL_PERIOD_NS, JOINT_NAMES, LiberoEnv, proprio
from aura_ros.sim.suites import EpisodeConfig, EpisodeVoidError
from aura_ros.training.demo_bags import Recording, index_bag, write_recording
from aura_ros.training.demonstrations import FORMAT, KEYPOINT_NAMES, LIT, DemoFolder, save_samples
from aura_ros.training.practice import practise
from aura_ros.types import LIBERO_ACTION_SPEC, FloatArray, Observation

if TYPE_CHECKING:
    from aura_ros.policy import Policy
    from aura_ros.sim.scene import Scene, SceneReader

# The last ten official states of every task are for judging, and nothing else.
TRAINED_STATES = 40
STREAM = 71_993
# Pushes: how likely one begins at a step, how many steps it lasts, how large it is in controller units.
PUSH_RATE, PUSH_STEPS, PUSH_SIZE = 0.03, (2, 6), 0.7
PUSH_SCALE = np.array([1.0, 1.0, 1.0, 0.2, 0.2, 0.5])
# Steps of a push at the very start: episodes then begin elsewhere.
START_PUSH = (0, 12)
# Where a policy drives it may be lost for good; its steps after these teach little.
POLICY_STEPS = 160
# A render costs as much as ten steps; neighbouring frames hardly differ.
FRAMES_EVERY = 3
# With until = "lift" an episode is over when the object is this much higher, m.
LIFTED_M = 0.05


@dataclass(frozen=True)
class CollectJob:
    """One demonstration. policy: checkpoint of the backbone that drives; "": the expert does.

    policy_hash: what tells its episodes from another policy's. instruction_of: the task whose instruction is given; -1: its
    own. frames_every: steps between frames of an expert's episode. until: "end" of the task, or
    "lift": half of it. cues: of a cue task, how many episodes share a state: 2, one for each cue, or 4, each of them with
    the target named and not.
    """

    folder: str
    suite: str
    task: int
    number: int
    displaced: bool
    image_size: int = 256
    seed: int = 0
    policy: str = ""
    instruction_of: int = -1
    policy_hash: str = ""
    frames_every: int = FRAMES_EVERY
    until: str = "end"
    cues: int = 0

    @property
    def key(self) -> str:
        """Unique in a folder."""
        driver = f"policy{self.policy_hash[:8]}" if self.policy else "expert"
        split = "displaced" if self.displaced else "official"
        told = "" if self.instruction_of < 0 else f"-told{self.instruction_of}"
        shared = f"-of{self.cues}" if self.cues else ""
        return f"{self.suite}-t{self.task}{told}-{split}-{driver}-s{self.seed}-n{self.number}{shared}"

    @property
    def episode(self) -> EpisodeConfig:
        """Initial state, fixture seed and arrangement follow from seed and number. Raises UserError."""
        # Nothing but the cue may differ between the episodes of a state.
        place = self.number // max(self.cues, 1)
        fixtures = self.seed * 100_000 + place
        return EpisodeConfig(
            suite=self.suite,
            task=self.task,
            init_state=place % TRAINED_STATES,
            cue=self.number % 2 if self.cues else 0,
            named=self.number % 4 > 1 if self.cues == 4 else False,
            seed=fixtures,
            # Another seed's arrangements are others: a policy is corrected in what it has not seen.
            displaced=fixtures + 1 if self.displaced else 0,
            instruction_of=self.instruction_of,
            image_size=self.image_size,
        )


def head(image_size: int, frames_every: int = FRAMES_EVERY, until: str = "end") -> dict[str, Any]:
    """What all episodes of a folder share."""
    spec = LIBERO_ACTION_SPEC
    return {
        "format": FORMAT,
        "cameras": list(CAMERAS),
        "camera_pixels": image_size,
        "frames_every": frames_every,
        "until": until,
        "image_size": EMBEDDED.image.size,
        "horizon": spec.horizon,
        "period_s": spec.period_s,
        "action_names": list(spec.names),
        "held_out_states": f"{TRAINED_STATES}-49",
    }


def collect(job: CollectJob) -> dict[str, Any]:
    """Drive one episode and keep it if it succeeded or a policy drove it; what a worker does. Returns its line."""
    from aura_ros.sim.pool import environment

    config = job.episode
    env = environment(config)
    line: dict[str, Any] = {
        "key": job.key,
        "id": job.key,
        **{n: getattr(job, n) for n in ("suite", "task", "seed", "policy", "policy_hash", "instruction_of")},
        "task_name": env.task_name,
        "init_state": config.init_state,
        "fixture_seed": config.seed,
        "displaced": config.displaced,
        "cue": config.cue,
        "named": config.named,
    }
    try:
        return {**line, **_demonstrate(job, env)}
    except EpisodeVoidError as error:
        return {**line, "success": False, "steps": 0, "frames": 0, "problem": str(error)}


def _demonstrate(job: CollectJob, env: LiberoEnv) -> dict[str, Any]:
    """Drive and keep; what the episode was."""
    from aura_ros.sim.scene import SceneReader

    config = job.episode
    env.begin(config)
    recording = Recording(env.instruction, JOINT_NAMES, images={camera: {} for camera in CAMERAS})
    reader = SceneReader(env)
    rng = np.random.default_rng([STREAM, job.seed, job.task, job.number, int(job.displaced)])
    if config.has_cue:
        practise(env, rng)
    if job.policy:
        success = _driven_by_policy(env, reader, recording, job.policy)
    else:
        success = _driven_by_expert(env, reader, recording, rng, job)
    frames = 0
    if success or job.policy:
        frames = keep(job.key, recording, DemoFolder(job.folder))
    return {"instruction": env.instruction, "success": success, "steps": env.step_count, "frames": frames}


def keep(name: str, recording: Recording, folder: DemoFolder) -> int:
    """Write bag and index; returns the samples in it. What is there of an episode that was cut off is replaced."""
    bag = folder.bags / name
    for leftover in (bag, bag.with_name(f"{name}.incomplete")):
        shutil.rmtree(leftover, ignore_errors=True)
    write_recording(bag, recording)
    samples = index_bag(bag, EMBEDDED.image, EMBEDDED.cameras)
    save_samples(folder.index / f"{name}.npz", samples)
    return len(samples)


def _driven_by_expert(
    env: LiberoEnv, reader: SceneReader, recording: Recording, rng: np.random.Generator, job: CollectJob
) -> bool:
    from aura_ros.sim.expert import decide
    from aura_ros.sim.relabel import relabel

    horizon = LIBERO_ACTION_SPEC.horizon
    pushes = _pushes(env.max_steps + horizon, rng)
    # Every episode has its first frame, the others at steps of its own: seen together they leave none out.
    offset = int(rng.integers(job.frames_every))
    lowest, lifted_at = _height(reader.read()), -1
    done = False
    while not done:
        step = env.step_count
        stamp = step * CONTROL_PERIOD_NS
        scene = reader.read()
        if lifted_at < 0 and job.until == "lift" and _height(scene) > lowest + LIFTED_M:
            lifted_at = step
        if lifted_at >= 0 and step == lifted_at + horizon:
            # The last frame has its successors.
            return True
        if lifted_at < 0 and (step == 0 or step % job.frames_every == offset):
            # What is executed from here on is no example where a push comes in between.
            led = env.held or pushes[step : step + horizon].any()
            plan = relabel(env, reader, horizon) if led else None
            _record(env, scene, recording)
            if plan is not None:
                recording.actions.append((stamp, model_rows(plan)))
        action = decide(scene).action
        if pushes[step].any():
            action[:6] = np.clip(action[:6] + pushes[step], -1, 1)
        elif not env.held:
            recording.actions.append((stamp, model_rows(action)))
        outcome = env.step(action)
        done = outcome.done
    # The last steps have no successors; what the expert would go on to do is to stay.
    rest = np.array([0.0] * 6 + [float(action[6])])
    for extra in range(horizon):
        recording.actions.append(((env.step_count + extra) * CONTROL_PERIOD_NS, model_rows(rest)))
    return outcome.success


def _height(scene: Scene) -> float:
    """How high the lowest point of the object is that is wanted next, m."""
    goal = scene.next_goal or scene.goals[-1]
    return float(scene.items[goal.item].low[2])


def _pushes(steps: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """What is added to the arm's actions, float64 [steps, 6], controller units: bursts, zeros between."""
    pushes = np.zeros((steps, 6))
    begin, length = 0, int(rng.integers(*START_PUSH))
    while begin < steps:
        pushes[begin : begin + length] = rng.uniform(-1, 1, 6) * PUSH_SIZE * PUSH_SCALE
        begin += length + int(rng.geometric(PUSH_RATE))
        length = int(rng.integers(*PUSH_STEPS))
    return pushes


def _driven_by_policy(env: LiberoEnv, reader: SceneReader, recording: Recording, checkpoint: str) -> bool:
    from aura_ros.policy.policy import ActionRejected
    from aura_ros.sim.actions import chunk_row_to_env
    from aura_ros.sim.relabel import relabel

    policy = _policy(checkpoint)
    policy.reset()
    done = success = False
    chunk = None
    while not done and env.step_count < POLICY_STEPS:
        row = env.step_count % LIBERO_ACTION_SPEC.horizon
        if row == 0:
            label = relabel(env, reader, LIBERO_ACTION_SPEC.horizon)
            seen = _record(env, reader.read(), recording)
            recording.actions.append((env.step_count * CONTROL_PERIOD_NS, model_rows(label)))
            images = {name: seen.images[name] for name in EMBEDDED.cameras}
            try:
                chunk = policy.act(Observation(images, proprio(seen), env.instruction)).chunk
            except ActionRejected:
                # What led there is labelled; nothing of the chunk may be executed.
                break
        assert chunk is not None
        outcome = env.step(chunk_row_to_env(chunk.data[row]))
        done, success = outcome.done, outcome.success
    return success


def _record(env: LiberoEnv, scene: Scene, recording: Recording) -> Any:
    """Add what a robot would see now, and where target, place and all objects are."""
    seen = env.observe()
    stamp = env.step_count * CONTROL_PERIOD_NS
    for camera, image in seen.images.items():
        recording.images[camera][stamp] = encode_jpeg(image)
    recording.robot[stamp] = (seen.joint_positions, seen.ee_position, seen.ee_quaternion)
    goal = scene.next_goal or scene.goals[-1]
    items = sorted(scene.items)
    recording.keypoint_names = (*KEYPOINT_NAMES, *items, LIT)
    lit = env.hold.schedule.lit(env.step_count)
    points = [scene.items[goal.item].centre, goal.at, *(scene.items[name].centre for name in items)]
    points.append(scene.items[lit[0]].centre if lit else np.full(3, np.nan))
    recording.keypoints[stamp] = np.stack(points)
    return seen


def model_rows(actions: npt.ArrayLike) -> FloatArray:
    """Expert's actions [.., 7] as the model has them: controller units, gripper 1 open, 0 closed; float32."""
    rows = np.array(actions, np.float32)
    rows[..., 6] = (1.0 - rows[..., 6]) / 2.0
    return rows


_loaded: dict[str, Policy] = {}


def _policy(checkpoint: str) -> Policy:
    """The policy that drives, loaded once a process; its memory is untrained, which adds nothing."""
    from aura_ros.policy import load_policy

    if checkpoint not in _loaded:
        _loaded.clear()
        _loaded[checkpoint] = load_policy(
            backbone="compact", checkpoint=Path(checkpoint), memory_checkpoint=UNTRAINED
        )
    return _loaded[checkpoint]


def jobs(
    folder: Path,
    suite: str,
    task: int,
    numbers: range,
    *,
    split: str,
    image_size: int,
    seed: int,
    policy: str,
    policy_hash: str = "",
    others: Sequence[int] = (),
    frames_every: int = FRAMES_EVERY,
    until: str = "end",
    cues: int = 0,
) -> list[CollectJob]:
    """Demonstrations of a task; with split "mixed" every second one is displaced.

    others: tasks whose instructions two of four take in turn, one of them official and one displaced.
    """
    template = CollectJob(
        str(folder), suite, task, 0, False, image_size, seed, policy, policy_hash=policy_hash
    )
    template = dataclasses.replace(template, frames_every=frames_every, until=until, cues=cues)
    return [
        dataclasses.replace(
            template,
            number=number,
            displaced=split == "displaced" or (split == "mixed" and number // max(cues, 1) % 2 == 1),
            instruction_of=others[number // 4 % len(others)] if others and number % 4 > 1 else -1,
        )
        for number in numbers
    ]
