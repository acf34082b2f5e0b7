"""The doctor: every fault becomes a line that says what to type, and none ends the doctor."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from aura_ros import doctor
from aura_ros.doctor import CheckResult


@pytest.fixture
def versions(monkeypatch):
    """Pretend that these distributions are installed, and no others."""
    known: dict[str, str] = {}
    monkeypatch.setattr(doctor, "installed", known.get)
    return known


@pytest.fixture
def modules(monkeypatch):
    """Pretend that importing these modules gives these objects, or raises these exceptions."""
    known: dict[str, object] = {}
    real = doctor.importlib.import_module

    def import_module(name: str):
        found = known.get(name)
        if isinstance(found, Exception):
            raise found
        return found if found is not None else real(name)

    monkeypatch.setattr(doctor.importlib, "import_module", import_module)
    return known


def lines_of(monkeypatch, results: list[CheckResult]) -> tuple[int, list[str]]:
    monkeypatch.setattr(doctor, "run_checks", lambda quick: iter(results))
    written: list[str] = []
    code = doctor.run_doctor(write=written.append)
    return code, "".join(written).splitlines()


def test_exit_status_is_0_without_a_problem_and_absent_is_none(monkeypatch):
    code, lines = lines_of(
        monkeypatch,
        [CheckResult("ROS", "ok", "kilted, rclpy 9.1.2"), CheckResult("MuJoCo", "absent", "none")],
    )
    assert code == 0
    assert lines == [
        "ok       ROS           kilted, rclpy 9.1.2",
        "absent   MuJoCo        none",
        "no problem found",
    ]


def test_problem_says_what_to_do_on_its_own_line_and_gives_status_1(monkeypatch):
    code, lines = lines_of(monkeypatch, [CheckResult("torch", "problem", "two\nlines", "pip install torch")])
    assert code == 1
    assert lines == ["problem  torch         two lines -> pip install torch", "1 problem found"]


def test_unforeseen_exception_of_a_check_is_a_problem_and_the_rest_still_runs(monkeypatch):
    def broken():
        raise RuntimeError("boom\nmore")

    monkeypatch.setattr(doctor, "check_ros", broken)
    monkeypatch.setattr(doctor, "check_torch", lambda: CheckResult("torch", "ok", ""))
    monkeypatch.setattr(doctor, "check_mujoco", lambda: CheckResult("MuJoCo", "absent", ""))
    results = {r.name: r for r in doctor.run_checks()}
    assert (results["ROS"].status, results["ROS"].detail) == ("problem", "RuntimeError: boom")
    assert results["Python"].status == "ok"
    assert list(results)[-1] == "MuJoCo"


@pytest.mark.parametrize(
    ("quick", "rendering", "names"),
    [
        (False, "ok", ["MuJoCo", "rendering", "settling"]),
        (True, "ok", ["MuJoCo", "rendering"]),
        (False, "problem", ["MuJoCo", "rendering"]),
    ],
)
def test_physics_is_tried_only_when_wanted_and_rendering_works(monkeypatch, quick, rendering, names):
    monkeypatch.setattr(doctor, "check_torch", lambda: CheckResult("torch", "ok", ""))
    monkeypatch.setattr(doctor, "check_mujoco", lambda: CheckResult("MuJoCo", "ok", ""))
    monkeypatch.setattr(doctor, "check_rendering", lambda: CheckResult("rendering", rendering, ""))
    monkeypatch.setattr(doctor, "check_settling", lambda: CheckResult("settling", "ok", ""))
    assert [r.name for r in doctor.run_checks(quick)][8:] == names


def test_importing_the_doctor_imports_neither_ros_nor_torch_nor_mujoco():
    program = "import sys, aura_ros.doctor; print({'rclpy', 'torch', 'mujoco', 'cv2'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"


def test_old_python_is_named_with_what_is_needed(monkeypatch):
    monkeypatch.setattr(doctor.sys, "version_info", (3, 9, 2, "final", 0))
    result = doctor.check_python()
    assert (result.status, result.detail) == ("problem", "3.9.2; 3.10 or newer is needed")


def test_missing_rclpy_says_how_to_get_it(modules):
    modules["rclpy"] = ImportError("No module named 'rclpy'")
    result = doctor.check_ros()
    assert result.status == "problem"
    assert "No module named 'rclpy'" in result.detail
    assert "source /opt/ros" in result.what_to_do


def test_ros_line_names_distribution_rclpy_and_middleware(modules, versions, monkeypatch):
    monkeypatch.setenv("ROS_DISTRO", "jazzy")
    versions["rclpy"] = "7.1.0"
    modules["rclpy"] = SimpleNamespace()
    modules["rclpy.utilities"] = SimpleNamespace(
        get_rmw_implementation_identifier=lambda: "rmw_cyclonedds_cpp"
    )
    assert doctor.check_ros().detail == "jazzy, rclpy 7.1.0, rmw_cyclonedds_cpp"


def built(**fields: list[str]):
    """A module of generated messages with these fields."""
    return SimpleNamespace(
        **{
            name: SimpleNamespace(get_fields_and_field_types=lambda names=names: dict.fromkeys(names, ""))
            for name, names in fields.items()
        }
    )


def test_messages_of_an_older_build_are_told_by_the_field(modules):
    fields = doctor.expected_fields()
    assert "state_bytes" in fields["GateEvent"]
    modules["aura_ros.msg"] = built(**fields)
    assert doctor.check_messages().status == "ok"
    fields["GateEvent"] = [f for f in fields["GateEvent"] if f != "state_bytes"]
    modules["aura_ros.msg"] = built(**fields)
    result = doctor.check_messages()
    assert (result.status, result.detail) == ("problem", "GateEvent differs in state_bytes: an older build")
    del fields["GateEvent"]
    modules["aura_ros.msg"] = built(**fields)
    assert doctor.check_messages().detail == "aura_ros.msg has no GateEvent: an older build"


def test_messages_that_are_not_built_are_a_problem(modules):
    modules["aura_ros.msg"] = ImportError("No module named 'aura_ros.msg'")
    result = doctor.check_messages()
    assert result.status == "problem"
    assert "pip install" in result.what_to_do


@pytest.mark.parametrize(
    ("found", "status"), [(None, "problem"), ("2.5.1", "problem"), ("2.6.0", "ok"), ("2.13.0+cpu", "ok")]
)
def test_torch_version_is_checked_as_numbers_not_as_text(versions, modules, found, status):
    if found:
        versions["torch"] = found
    cuda = SimpleNamespace(is_available=lambda: True, get_device_name=lambda index: "NVIDIA H200")
    modules["torch"] = SimpleNamespace(cuda=cuda)
    result = doctor.check_torch()
    assert result.status == status
    assert ("CUDA: NVIDIA H200" in result.detail) == (status == "ok")


@pytest.mark.parametrize(
    ("found", "status"),
    [(None, "problem"), ("4.57.5", "problem"), ("4.57.6", "ok"), ("5.24.0", "ok"), ("6.0.0", "problem")],
)
def test_transformers_outside_its_range_names_the_range(versions, found, status):
    if found:
        versions["transformers"] = found
    result = doctor.check_transformers()
    assert result.status == status
    if status == "problem":
        assert result.what_to_do == 'pip install "transformers>=4.57.6,<6"'


def test_rosbags_of_another_series_is_a_problem(versions):
    versions["rosbags"] = "0.12.0"
    assert doctor.check_rosbags().status == "problem"


def test_mcap_is_optional(versions):
    assert doctor.check_mcap().status == "absent"
    versions["mcap"] = "1.6.0"
    assert doctor.check_mcap() == CheckResult("mcap", "ok", "1.6.0")


def test_two_opencv_distributions_are_a_problem(versions):
    versions.update({"opencv-python": "4.14", "opencv-python-headless": "4.14"})
    result = doctor.check_opencv()
    assert result.status == "problem"
    assert "pip uninstall -y opencv-python-headless" in result.what_to_do


def test_opencv_without_libgl_names_the_system_package(versions, modules):
    versions["opencv-python"] = "4.14"
    modules["cv2"] = ImportError("libGL.so.1: cannot open shared object file: No such file or directory")
    assert doctor.check_opencv().what_to_do == "apt-get install -y libgl1 libglib2.0-0"


def test_without_mujoco_the_simulator_is_absent_not_broken(versions):
    result = doctor.check_mujoco()
    assert result.status == "absent"
    assert "[libero]" in result.what_to_do


def test_simulator_checks_keep_their_verdict_and_advice(versions, modules):
    versions["mujoco"] = "3.8.0"
    verdict = SimpleNamespace(
        name="MuJoCo version", status="problem", detail="3.8.0", what_to_do="pip install x"
    )
    modules["aura_ros.sim.checks"] = SimpleNamespace(
        mujoco_version=lambda: verdict, gl_renders=lambda: verdict
    )
    assert doctor.check_mujoco() == CheckResult("MuJoCo", "problem", "3.8.0", "pip install x")
    assert doctor.check_rendering() == CheckResult("rendering", "problem", "3.8.0", "pip install x")


def test_simulator_that_dies_of_a_signal_is_a_problem_not_the_doctors_end(monkeypatch):
    monkeypatch.setattr(doctor, "SETTLING_PROGRAM", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    result = doctor.check_settling()
    assert (result.status, result.detail) == ("problem", "the simulator ended (exit status -11)")


def test_settling_reads_the_last_line_behind_the_simulators_own_output(monkeypatch):
    answer = '{"name": "settling", "status": "ok", "detail": "0.05 m", "what_to_do": ""}'
    monkeypatch.setattr(doctor, "SETTLING_PROGRAM", f"print('[info] task order')\nprint('''{answer}''')")
    assert doctor.check_settling() == CheckResult("settling", "ok", "0.05 m")


def test_simulator_that_hangs_is_a_problem(monkeypatch):
    monkeypatch.setattr(doctor, "SETTLING_LIMIT_S", 0.2)
    monkeypatch.setattr(doctor, "SETTLING_PROGRAM", "import threading; threading.Event().wait()")
    assert "did not start in 0.2 s" in doctor.check_settling().detail
