"""Look at this machine and say what is there, what is missing and what to type (`aura doctor`)."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import aura_ros

Status = Literal["ok", "problem", "absent"]

PYTHON_NEEDED = (3, 10)
TORCH_NEEDED = "2.6"
TRANSFORMERS_NEEDED = ("4.57.6", "6")
ROSBAGS_NEEDED = ("0.11", "0.12")
SETTLING_LIMIT_S = 180
REINSTALL = (
    "pip install --force-reinstall --no-deps . (with colcon: build again and source install/setup.bash)"
)
NOT_INSTALLED = "not installed"
# Runs the simulator apart: a broken GL driver takes only that process down. The last line is the result.
SETTLING_PROGRAM = """
import dataclasses, json
from aura_ros.sim.checks import settling
print()
print(json.dumps(dataclasses.asdict(settling())))
"""


@dataclass(frozen=True)
class CheckResult:
    """Outcome of one check.

    status: "ok"; "problem", to be mended by `what_to_do`; or "absent", an optional part not installed.
    """

    name: str
    status: Status
    detail: str
    what_to_do: str = ""

    def line(self) -> str:
        """The result as one line, what to do at its end."""
        text = " ".join(f"{self.status:<8} {self.name:<13} {self.detail}".splitlines())
        return f"{text} -> {self.what_to_do}" if self.what_to_do else text


def run_doctor(quick: bool = False, write: Callable[[str], object] | None = None) -> int:
    """Run every check and write one line for each as it is done.

    quick: leave out the simulator's physics (15 s). write: takes the text; by default standard output.
    Returns 0 when there is no problem, else 1. Parts that are absent by choice are no problem.
    """
    write = write or sys.stdout.write
    problems = 0
    for result in run_checks(quick):
        problems += result.status == "problem"
        write(result.line() + "\n")
        sys.stdout.flush()
    write(f"{problems} problem{'s' * (problems != 1)} found\n" if problems else "no problem found\n")
    return 1 if problems else 0


def run_checks(quick: bool = False) -> Iterator[CheckResult]:
    """The checks' results in turn. What a check raises becomes a problem of its own, never an exception."""
    checks: list[tuple[str, Callable[[], CheckResult]]] = [
        ("Python", check_python),
        ("ROS", check_ros),
        ("messages", check_messages),
        ("torch", check_torch),
        ("transformers", check_transformers),
        ("OpenCV", check_opencv),
        ("rosbags", check_rosbags),
        ("mcap", check_mcap),
        ("MuJoCo", check_mujoco),
    ]
    for name, check in checks:
        result = guarded(name, check)
        yield result
    if result.status != "ok":
        return
    rendering = guarded("rendering", check_rendering)
    yield rendering
    if not quick and rendering.status == "ok":
        yield guarded("settling", check_settling)


def guarded(name: str, check: Callable[[], CheckResult]) -> CheckResult:
    """A check's result, or its exception as a problem."""
    try:
        return check()
    except Exception as error:  # the doctor must live to tell the rest
        reason = str(error).strip().splitlines() or [""]
        return CheckResult(
            name, "problem", f"{type(error).__name__}: {reason[0]}", f"look at the {name} installation"
        )


def check_python() -> CheckResult:
    """Is this Python new enough?"""
    found = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] < PYTHON_NEEDED:
        needed = ".".join(map(str, PYTHON_NEEDED))
        return CheckResult(
            "Python", "problem", f"{found}; {needed} or newer is needed", "make PYTHON=python3.11 test"
        )
    return CheckResult("Python", "ok", f"{found} in {sys.prefix}")


def check_ros() -> CheckResult:
    """Which ROS distribution, rclpy and middleware are in use?"""
    try:
        importlib.import_module("rclpy")
        utilities = importlib.import_module("rclpy.utilities")
        middleware = utilities.get_rmw_implementation_identifier()
    except Exception as error:  # a missing library shows as ImportError, a missing middleware as RuntimeError
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return CheckResult(
            "ROS",
            "problem",
            f"rclpy cannot be used ({reason})",
            "source /opt/ros/<distro>/setup.bash, "
            "or pip install ros-kilted-rclpy ros-kilted-rmw-fastrtps-cpp",
        )
    version = installed("rclpy")
    return CheckResult(
        "ROS", "ok", f"{ros_distribution()}, rclpy {version or 'of unknown version'}, {middleware}"
    )


def ros_distribution() -> str:
    """Name of the ROS distribution: ROS_DISTRO of a sourced workspace, or that of the installed wheels."""
    sourced = os.environ.get("ROS_DISTRO")
    if sourced:
        return sourced
    for distribution in importlib.metadata.distributions():
        match = re.fullmatch(r"ros-(\w+)-rclpy", distribution.metadata["Name"] or "")
        if match:
            return match.group(1)
    return "unknown distribution"


def check_messages() -> CheckResult:
    """Are this package's messages built, and with the fields of its .msg files?"""
    try:
        module = importlib.import_module("aura_ros.msg")
    except ImportError as error:
        return CheckResult("messages", "problem", f"aura_ros.msg cannot be imported ({error})", REINSTALL)
    expected = expected_fields()
    for name, fields in expected.items():
        if not hasattr(module, name):
            return CheckResult(
                "messages", "problem", f"aura_ros.msg has no {name}: an older build", REINSTALL
            )
        built = list(getattr(module, name).get_fields_and_field_types())
        different = sorted(set(fields) ^ set(built))
        if different:
            return CheckResult(
                "messages", "problem", f"{name} differs in {', '.join(different)}: an older build", REINSTALL
            )
    return CheckResult("messages", "ok", f"{len(expected)} aura_ros messages, fields as in their definitions")


def expected_fields() -> dict[str, list[str]]:
    """Message name -> field names, from the source tree in use, else from the installed definitions."""
    reading = importlib.import_module("rosbags.typesys").get_types_from_msg
    source = Path(aura_ros.__file__).resolve().parents[1] / "msg"
    folder = (
        source
        if source.is_dir()
        else importlib.import_module("aura_ros.report.definitions").message_directory()
    )
    fields: dict[str, list[str]] = {}
    for path in sorted(folder.glob("*.msg")):
        name = f"aura_ros/msg/{path.stem}"
        _, members = reading(path.read_text(), name)[name]
        fields[path.stem] = [member for member, _ in members]
    return fields


def check_torch() -> CheckResult:
    """Which torch, and on which device will policies run?"""
    found = installed("torch")
    if found is None or release(found) < release(TORCH_NEEDED):
        state = NOT_INSTALLED if found is None else found
        return CheckResult(
            "torch",
            "problem",
            f"{state}; {TORCH_NEEDED} or newer is needed",
            f'pip install "torch>={TORCH_NEEDED}"',
        )
    torch = importlib.import_module("torch")
    if torch.cuda.is_available():
        device = f"CUDA: {torch.cuda.get_device_name(0)}"
    else:
        device = f"CPU, {torch.get_num_threads()} threads"
    return CheckResult("torch", "ok", f"{found}, {device}")


def check_transformers() -> CheckResult:
    """Is transformers within the range that the backbone is tested with? Does not import it."""
    return within("transformers", *TRANSFORMERS_NEEDED)


def check_rosbags() -> CheckResult:
    """Is rosbags, which writes and reads bags, of the right series?"""
    return within("rosbags", *ROSBAGS_NEEDED)


def check_mcap() -> CheckResult:
    """Is the optional mcap library there? Bags are written and read without it."""
    found = installed("mcap")
    if found is None:
        return CheckResult("mcap", "absent", f"{NOT_INSTALLED} (needed by tests only)")
    return CheckResult("mcap", "ok", found)


def check_opencv() -> CheckResult:
    """Does exactly one OpenCV distribution import?"""
    names = (
        "opencv-python",
        "opencv-python-headless",
        "opencv-contrib-python",
        "opencv-contrib-python-headless",
    )
    found = {name: version for name in names if (version := installed(name))}
    if len(found) > 1:
        others = " ".join(name for name in found if name != "opencv-python")
        return CheckResult(
            "OpenCV",
            "problem",
            f"{', '.join(found)} overwrite each other",
            f"pip uninstall -y {others} && pip install --force-reinstall --no-deps opencv-python",
        )
    try:
        version = importlib.import_module("cv2").__version__
    except ImportError as error:
        missing_library = "cannot open shared object" in str(error)
        cure = "apt-get install -y libgl1 libglib2.0-0" if missing_library else "pip install opencv-python"
        return CheckResult("OpenCV", "problem", f"cv2 cannot be imported ({error})", cure)
    return CheckResult("OpenCV", "ok", version)


def check_mujoco() -> CheckResult:
    """Is the simulator's MuJoCo the version that LIBERO's physics needs?"""
    if installed("mujoco") is None:
        return CheckResult(
            "MuJoCo",
            "absent",
            f"{NOT_INSTALLED}: no LIBERO simulator here",
            'pip install "aura_ros[libero]" to have one',
        )
    return simulator_check("MuJoCo", "mujoco_version")


def check_rendering() -> CheckResult:
    """Does off-screen rendering give a picture? Runs in a process of its own."""
    return simulator_check("rendering", "gl_renders")


def check_settling() -> CheckResult:
    """Do LIBERO's objects stay where they are put? Runs in a process of its own, about 15 s."""
    root = str(Path(aura_ros.__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    try:
        run = subprocess.run(
            [sys.executable, "-c", SETTLING_PROGRAM],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=SETTLING_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return CheckResult(
            "settling",
            "problem",
            f"the simulator did not start in {SETTLING_LIMIT_S} s",
            "try again on an idle machine",
        )
    if run.returncode != 0:
        reason = (run.stderr.strip().splitlines() or [f"exit status {run.returncode}"])[-1]
        return CheckResult(
            "settling", "problem", f"the simulator ended ({reason})", 'pip install "aura_ros[libero]"'
        )
    found = json.loads(run.stdout.strip().splitlines()[-1])
    return CheckResult("settling", found["status"], found["detail"], found["what_to_do"])


def simulator_check(name: str, function: str) -> CheckResult:
    """Run one of the simulator's own checks and name it as the doctor does."""
    found = getattr(importlib.import_module("aura_ros.sim.checks"), function)()
    return CheckResult(name, found.status, found.detail, found.what_to_do)


def within(name: str, low: str, below: str) -> CheckResult:
    """Is an installed distribution's version at least `low` and under `below`?"""
    found = installed(name)
    cure = f'pip install "{name}>={low},<{below}"'
    if found is None:
        return CheckResult(name, "problem", NOT_INSTALLED, cure)
    if not release(low) <= release(found) < release(below):
        return CheckResult(
            name, "problem", f"{found} is installed; {low} or newer, under {below}, is needed", cure
        )
    return CheckResult(name, "ok", found)


def installed(distribution: str) -> str | None:
    """Version of an installed distribution, or None; imports nothing of it."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def release(version: str) -> tuple[int, ...]:
    """The numbers at a version's start, so that versions compare: "2.13.0+cpu" -> (2, 13, 0)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match.group(0).split(".")) if match else ()
