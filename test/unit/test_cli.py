"""`aura ...`: a mistake is one line and exit 2 before anything starts; help and pipes behave."""

import ast
import dataclasses
import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from aura_ros import cli, preflight
from aura_ros.errors import UserError
from aura_ros.nodes.options import POLICY_OPTIONS, SIM_OPTIONS, read_options, same_limit
from aura_ros.nodes.policy_config import PolicyNodeConfig
from aura_ros.nodes.sim_config import SimNodeConfig

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def aura(monkeypatch, capsys, tmp_path):
    """Run the command in this process, in an empty folder; returns (exit status, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROS_DOMAIN_ID", "230")
    # A check that lets a mistake pass must fail here, not start an episode.
    monkeypatch.setattr("subprocess.Popen", None)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["aura", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return (end.value.code or 0, *capsys.readouterr())

    return run


def program(*arguments: str, **options) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "aura_ros.cli", *arguments]
    return subprocess.run(command, text=True, timeout=60, env=env, **options)


MISTAKES = {
    "suite": (["--suite", "libero_11"], "suite 'libero_11'", "libero_spatial, libero_object"),
    "task too high": (["--task", "10"], "task 10", "0..9"),
    "task negative": (["--task", "-1"], "task -1", "0..9"),
    "task of another suite": (["--suite", "libero_90", "--task", "90"], "task 90", "0..89"),
    "task a word": (["--task", "abc"], "task 'abc'", "whole number"),
    "task a fraction": (["--task", "1.5"], "task '1.5'", "whole number"),
    "task empty": (["--task", ""], "task ''", "whole number"),
    "init state": (["--init-state", "50"], "init_state 50", "0..49"),
    "seed": (["--seed", "-1"], "seed -1", "0 to 4294967295"),
    "policy seed": (["--policy-seed", "-1"], "policy_seed -1", "0 to 2147483647"),
    "max steps": (["--max-steps", "-5"], "max_steps -5", "0 to 100000"),
    "image size": (["--image-size", "1"], "image_size 1", "16 to 1024"),
    "rate": (["--rate", "nan"], "rate nan", "0.0 to 1000.0"),
    "backbone": (["--backbone", "resnet"], "backbone 'resnet'", "compact, openvla_oft"),
    "backbone without weights": (["--backbone", "openvla_oft"], "openvla_oft", ".safetensors"),
    "dtype": (["--dtype", "int8"], "dtype 'int8'", "float32, bfloat16"),
    "checkpoint": (["--checkpoint", "/no/where"], "checkpoint '/no/where'", "existing"),
    "memory": (["--memory-checkpoint", "/no/where"], "memory checkpoint '/no/where'", "existing"),
    "memory size": (["--memory-state-dim", "0"], "memory_state_dim 0", "1 to 1024"),
    "threshold": (["--gate-threshold", "2"], "gate_threshold 2.0", "-1.0 to 1.0"),
    "action limit": (["--action-limit", "0"], "action_limit 0.0", "0.01 to"),
    "record into a file": (["--record", __file__], __file__, "new directory"),
    "record into a full folder": (["--record", str(ROOT)], str(ROOT), "new directory"),
    "record where nothing can be": (["--record", "/proc/x/bag"], "/proc/x/bag", "place you may write"),
    "json in a missing folder": (["--json", "/no/where/a.json"], "/no/where/a.json", "may write"),
    "json where nothing can be": (["--json", "/proc/a.json"], "/proc/a.json", "may write"),
    "json a folder": (["--json", str(ROOT)], str(ROOT), "may write"),
    "option": (["--tusk", "3"], "--tusk", "aura sim --help"),
    "option without value": (["--task"], "--task", "aura sim --help"),
    "argument": (["libero_10"], "libero_10", "aura sim --help"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistake_is_one_line_naming_value_and_remedy_and_nothing_is_left(aura, case, tmp_path):
    arguments, value, allowed = MISTAKES[case]
    status, said, mistake = aura("sim", *arguments)
    assert (status, said) == (2, "")
    assert mistake.startswith("aura: ")
    assert mistake.count("\n") == 1
    assert value in mistake
    assert allowed in mistake
    assert "__" not in mistake.replace(__file__, ""), "a field's name that is no option"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["--checkpoint", "--memory-checkpoint", "--record", "--json"])
def test_path_that_may_not_be_looked_at_is_one_line(aura, monkeypatch, option, tmp_path):
    secret = "/root_of_another/x"

    def forbidden(name):
        honest = getattr(Path, name)

        def ask(path, *arguments, **options):
            if str(path).startswith("/root_of_another"):
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return honest(path, *arguments, **options)

        return ask

    # As for a user who may not search the folder; the tests may run as one who may do everything.
    for name in ("exists", "is_dir", "is_file", "stat", "open", "resolve"):
        monkeypatch.setattr(Path, name, forbidden(name))
    status, said, mistake = aura("sim", option, secret)
    assert (status, said) == (2, "")
    assert mistake.startswith("aura: ")
    assert mistake.count("\n") == 1
    assert secret in mistake
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [[], ["simulate"], ["--task", "3"]], ids=["none", "unknown", "option"])
def test_missing_or_unknown_command_is_one_line_with_the_commands(aura, arguments):
    status, _, mistake = aura(*arguments)
    assert status == 2
    assert mistake.count("\n") == 1
    assert "sim, checkpoint, bench, recall, doctor" in mistake
    assert "---" not in mistake
    assert mistake.rstrip().endswith("(see: aura --help)")


def test_file_that_is_no_memory_is_refused_before_the_simulator_starts(aura, tmp_path):
    (tmp_path / "text.safetensors").write_text("not a memory")
    save_file({"w": np.zeros(3, np.float32)}, tmp_path / "other.safetensors")
    for name in ("text.safetensors", "other.safetensors"):
        status, _, mistake = aura("sim", "--memory-checkpoint", name)
        assert (status, mistake.count("\n")) == (2, 1)
        assert f"memory checkpoint '{name}'" in mistake


def test_interrupted_recording_beside_the_bag_is_refused_and_kept(aura, tmp_path):
    kept = tmp_path / "bag.incomplete" / "bag_0.mcap"
    kept.parent.mkdir()
    kept.write_text("an hour of data")
    status, _, mistake = aura("sim", "--record", "bag")
    assert (status, mistake.count("\n")) == (2, 1)
    assert "repair_bag" in mistake
    assert kept.read_text() == "an hour of data"


@pytest.mark.parametrize("domain", ["233", "-1", "one"])
def test_ros_domain_that_does_not_exist_is_one_line(aura, monkeypatch, domain):
    monkeypatch.setenv("ROS_DOMAIN_ID", domain)
    status, _, mistake = aura("sim")
    assert (status, mistake.count("\n")) == (2, 1)
    assert f"ROS_DOMAIN_ID '{domain}' is out of range; allowed: 0 to 232" in mistake


def test_second_run_in_a_ros_domain_is_refused(aura):
    with preflight.ros_domain_of_its_own():
        status, _, mistake = aura("sim")
    assert (status, mistake.count("\n")) == (2, 1)
    assert "another `aura sim` runs in ROS domain 230" in mistake


def test_ros_domain_is_free_again_after_a_run(monkeypatch):
    monkeypatch.setenv("ROS_DOMAIN_ID", "231")
    for _ in range(2):
        with preflight.ros_domain_of_its_own():
            pass


@pytest.mark.parametrize("python", ["/no/such/python", "/bin/true", "/etc/passwd"])
def test_interpreter_of_the_simulator_that_is_none_is_refused(python):
    with pytest.raises(UserError, match=f"sim_python '{python}' cannot run the simulator"):
        preflight.check_python(python)


def test_interpreter_with_the_package_is_accepted():
    assert preflight.check_python(sys.executable) == sys.executable


def test_mistake_of_the_program_has_no_traceback_and_takes_no_time():
    run = program("sim", "--task", "10", capture_output=True)
    assert (run.returncode, run.stdout) == (2, "")
    assert (
        run.stderr == "aura: task 10 is out of range; allowed are the whole numbers 0..9 in libero_object\n"
    )


@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_help_fits_the_terminal_and_shows_defaults(columns):
    run = program("sim", "--help", capture_output=True)
    assert run.returncode == 0
    said = " ".join(run.stdout.replace("│", " ").split())
    for text in ("--suite STR", "(default: libero_object)", "--record PATH", "runs/<time>/bag"):
        assert text in said
    narrow = subprocess.run(
        [sys.executable, "-m", "aura_ros.cli", "sim", "--help"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": columns}, text=True, capture_output=True,
    )  # fmt: skip
    box = [line for line in narrow.stdout.splitlines() if line.startswith(("│", "╭", "╰"))]
    assert box
    assert max(map(len, box)) <= int(columns)
    assert "None" not in narrow.stdout


def interrupt(_command):
    signal.raise_signal(signal.SIGINT)
    return 0


COMMAND_LINES = {
    cli.Doctor: ["doctor"],
    cli.Inspect: ["checkpoint", "inspect", "a"],
    cli.Convert: ["checkpoint", "convert", "a", "b"],
    cli.BenchBackbone: ["bench", "backbone", "--random-weights"],
    cli.RECALL_COMMANDS["floors"]: ["recall", "floors"],
}


@pytest.mark.parametrize("command", COMMAND_LINES, ids=lambda c: c.__name__)
def test_interrupted_command_does_not_look_like_one_that_is_done(aura, monkeypatch, command):
    monkeypatch.setitem(cli.RUNNERS, command, interrupt)
    before = signal.getsignal(signal.SIGINT)
    status, said, line = aura(*COMMAND_LINES[command])
    assert (status, said) == (130, "")
    assert line == "aura: interrupted; run it again to have it whole\n"
    assert signal.getsignal(signal.SIGINT) is before


def test_interrupted_episode_is_quiet_where_it_has_nothing_to_sum_up(aura, monkeypatch):
    monkeypatch.setitem(cli.RUNNERS, cli.Sim, interrupt)
    assert aura("sim") == (0, "", "")


EARLY = """
import signal, sys

class Interrupt:
    def find_spec(self, name, *_):
        if name == "aura_ros.cli":
            signal.raise_signal(signal.SIGINT)

from aura_ros.__main__ import main
sys.meta_path.insert(0, Interrupt())
main()
"""


def test_interrupt_while_the_command_line_is_imported_is_one_line():
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-c", EARLY, "doctor"], env=env, capture_output=True, text=True, timeout=60
    )
    assert (run.returncode, run.stdout) == (130, "")
    assert run.stderr == "aura: interrupted; nothing was started\n"


def test_interrupt_after_a_command_is_done_keeps_its_status():
    done = "import atexit, signal\natexit.register(signal.raise_signal, signal.SIGINT)\n"
    text = done + "from aura_ros.__main__ import main\nmain()"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-c", text, "sim", "--task", "10"],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (run.returncode, run.stderr.count("\n")) == (2, 1)


def test_reader_that_goes_away_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    run = program("sim", "--help", stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (run.returncode, run.stderr) == (0, "")


# What a launch file alone can mean: where nodes live, and that nothing is recorded.
OF_THE_LAUNCH_FILE = {"record", "namespace", "sim_python"}


def test_launch_file_and_command_line_have_the_same_options():
    of_the_command = {f.name for f in dataclasses.fields(cli.Sim)}
    shared = {*SIM_OPTIONS, *POLICY_OPTIONS}
    assert of_the_command == shared | {*("record", "record_images", "record_latents", "json", "sim_python")}
    tree = ast.parse((ROOT / "launch" / "libero_sim.launch.py").read_text())
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "aura_ros.nodes.options"
        for alias in node.names
    }
    assert imported == {"SIM_OPTIONS", "POLICY_OPTIONS", "read_options", "same_limit"}
    declared = {
        node.args[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", "") == "DeclareLaunchArgument"
        and isinstance(node.args[0], ast.Constant)
    }
    assert declared == OF_THE_LAUNCH_FILE, "an option of its own belongs into aura_ros.nodes.options"


@pytest.mark.parametrize(
    ("config_type", "options"), [(SimNodeConfig, SIM_OPTIONS), (PolicyNodeConfig, POLICY_OPTIONS)]
)
def test_every_shared_option_is_a_field_of_its_node(config_type, options):
    assert set(options.values()) <= {f.name for f in dataclasses.fields(config_type)}


def test_options_that_were_not_given_keep_the_values_of_the_yaml():
    texts = dict.fromkeys(POLICY_OPTIONS, "") | {"policy_seed": "4", "gate_threshold": "0.25"}
    values = read_options(texts, PolicyNodeConfig, POLICY_OPTIONS, not_given="")
    assert values == {"seed": 4, "gate__threshold": 0.25}


def test_mistake_in_a_shared_option_names_the_option_and_not_the_field():
    texts = dict.fromkeys(POLICY_OPTIONS, "") | {"memory_state_dim": "0"}
    with pytest.raises(UserError) as refused:
        read_options(texts, PolicyNodeConfig, POLICY_OPTIONS, not_given="")
    assert str(refused.value) == "memory_state_dim 0 is out of range; allowed: 1 to 1024"


def test_simulator_is_given_the_limit_of_the_policy_and_no_other():
    assert same_limit({"seed": 3}, {"action_limit": 5.0}) == {"seed": 3, "action_limit": 5.0}
    assert same_limit({"seed": 3}, {"seed": 4}) == {"seed": 3}


def test_action_limit_reaches_policy_and_simulator(monkeypatch, tmp_path):
    plans = []

    class StopError(Exception):
        pass

    def supervisor(plan, *_):
        plans.append(plan)
        raise StopError

    pytest.importorskip("rclpy", reason="rclpy is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROS_DOMAIN_ID", "232")
    monkeypatch.setattr("aura_ros.nodes.supervisor.Supervisor", supervisor)
    command = cli.parse(["sim", "--action-limit", "5", "--seed", "3", "--policy-seed", "4"])
    with pytest.raises(StopError):
        cli.run_sim(command)
    given = dict(plans[0].parameters["libero_sim"])
    assert Path(given.pop("frames")).parent == tmp_path / "runs"
    assert given == {"seed": 3, "action_limit": 5.0}
    assert plans[0].parameters["policy_node"]["action_limit"] == 5.0
    assert plans[0].parameters["policy_node"]["seed"] == 4


def test_signals_are_counted_during_a_run_and_handled_as_before_after_it():
    from aura_ros.sim_run import Interrupts

    before = signal.getsignal(signal.SIGTERM)
    with Interrupts() as interrupted:
        assert not interrupted()
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert interrupted.count == 2
    assert signal.getsignal(signal.SIGTERM) is before
