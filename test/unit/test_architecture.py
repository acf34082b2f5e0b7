"""The house's import rules: data flows one way, ROS stays in one folder, importing costs nothing."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "aura_ros"
MODULES = sorted(PACKAGE.rglob("*.py"))

# At the root: shared words that everything may use, and the command line, which may use everything.
SHARED = {"", "config", "errors", "files", "geometry", "types", "share"}
FRONT = {
    "__main__", "certify_command", "checkpoint_command", "cli", "collect_command", "doctor",
    "endless_command", "eval_command", "expert_command", "index_command", "memory_command", "panel_base", "panel_command",
    "node_bench_command", "preflight",
    "recall_command", "rollouts_command", "sim_run", "states", "train_command",
}  # fmt: skip
# Who may import whom; a folder may always import itself and SHARED.
ALLOWED = {
    "backbones": set(),
    "memory": set(),
    "policy": {"backbones", "memory"},
    "control": set(),
    "sim": set(),
    # A robot's recordings are bags, so what reads and writes bags is of use in training too.
    "training": {"memory", "backbones", "policy", "sim", "report"},
    "bench": {"memory", "backbones", "policy", "sim", "training"},
    "report": set(),
    "nodes": {"policy", "memory", "backbones", "control", "sim", "report"},
}
GENERATED = ("aura_ros.msg", "aura_ros.srv", "aura_ros.action")
# "About 400": past it, ask what the second job is.
LONGEST = 400
# Modules of nodes/ that the command line reads before ROS is needed.
READ_EARLY = {
    f"aura_ros.nodes.{name}"
    for name in ("options", "policy_config", "sim_config", "player_config", "bench_config")
}
NODES_WITHOUT_ROS = {"aura_ros.nodes", *READ_EARLY}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def folder_of(module: str) -> str:
    """aura_ros.sim.libero is of sim, aura_ros.cli of cli, aura_ros of the empty name."""
    return [*module.split("."), ""][1]


def imports(path: Path, top_level_only: bool = False) -> set[str]:
    """Full names of the modules that a file imports; names imported from a package count as its modules."""
    tree = ast.parse(path.read_text())
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    found = set()
    for node in ast.walk(tree):
        if top_level_only and id(node) in inside:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def is_ros(module: str) -> bool:
    root = module.split(".")[0]
    generated = any(module == g or module.startswith(g + ".") for g in GENERATED)
    return generated or root.startswith("rclpy") or root.endswith(("_msgs", "_srvs", "_interfaces"))


def test_the_rules_see_what_they_must_see(tmp_path):
    file = tmp_path / "module.py"
    file.write_text(
        "import rclpy.node\nfrom aura_ros import msg\ndef f():\n    from aura_ros.sim import libero\n"
    )
    assert {m for m in imports(file) if is_ros(m)} == {"rclpy.node", "aura_ros.msg"}
    assert "aura_ros.sim.libero" in imports(file)
    assert "aura_ros.sim.libero" not in imports(file, top_level_only=True)
    assert [folder_of(m) for m in ("aura_ros", "aura_ros.cli", "aura_ros.sim.libero")] == ["", "cli", "sim"]
    assert [is_ros(m) for m in ("sensor_msgs.msg", "rclpy", "aura_ros.msg.GateEvent", "aura_ros.memory")] == [
        True, True, True, False,
    ]  # fmt: skip


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_one_way(path):
    here = folder_of(name_of(path))
    if here in FRONT:
        return
    assert here in ALLOWED or here in SHARED, (
        f"{here} has no rule; add it to this test and to the documentation"
    )
    may = ALLOWED.get(here, set()) | SHARED | {here}
    ours = {m for m in imports(path) if m.split(".")[0] == "aura_ros" and not is_ros(m)}
    # `from aura_ros import __version__` imports the root.
    wrong = {m for m in ours if folder_of(m) not in may and not folder_of(m).startswith("__")}
    assert not wrong


@pytest.mark.parametrize("path", [p for p in MODULES if "nodes" not in p.parts], ids=name_of)
def test_only_nodes_import_ros(path):
    wrong = {module for module in imports(path, top_level_only=True) if is_ros(module)}
    assert not wrong
    if folder_of(name_of(path)) not in FRONT:
        assert not {module for module in imports(path) if is_ros(module)}


@pytest.mark.parametrize("path", [p for p in MODULES if folder_of(name_of(p)) in FRONT], ids=name_of)
def test_command_line_imports_nodes_only_when_needed(path):
    nodes = {m for m in imports(path, top_level_only=True) if m.startswith("aura_ros.nodes")}
    # Names imported from an allowed module are its own.
    assert {
        m for m in nodes if m not in NODES_WITHOUT_ROS and m.rpartition(".")[0] not in READ_EARLY
    } == set()


@pytest.mark.parametrize(
    "module",
    [
        "aura_ros", "aura_ros.memory", "aura_ros.backbones", "aura_ros.sim", "aura_ros.policy", "aura_ros.control",
        "aura_ros.report", "aura_ros.nodes", "aura_ros.nodes.options",
        "aura_ros.nodes.policy_config", "aura_ros.nodes.sim_config",
        "aura_ros.cli",
        "aura_ros.sim_run",
    ],
)  # fmt: skip
def test_importing_needs_no_engine_and_leaves_root_logging_alone(module):
    program = (
        "import logging, sys\n"
        "root = logging.getLogger()\n"
        "before = (list(root.handlers), root.level, logging.raiseExceptions)\n"
        f"import {module}\n"
        "heavy = {'torch', 'transformers', 'rclpy', 'mujoco', 'robosuite', 'libero', 'matplotlib'} & set(sys.modules)\n"
        "after = (list(root.handlers), root.level, logging.raiseExceptions)\n"
        "sys.exit(f'imports {sorted(heavy)}' if heavy else f'{before} {after}' if before != after else 0)"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == ""


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_nothing_from_disk_or_network_is_unpickled(path):
    modules = {module.split(".")[0] for module in imports(path)}
    assert not modules & {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"}
    for node in ast.walk(ast.parse(path.read_text())):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        call = ast.unparse(node.func)
        keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
        if call == "torch.load":
            assert keywords.get("weights_only") == "True", f"line {node.lineno}: {ast.unparse(node)}"
        if call.endswith((".load", ".loadtxt")):
            assert keywords.get("allow_pickle", "False") == "False", f"line {node.lineno}"
        assert call not in ("yaml.load", "yaml.unsafe_load", "yaml.full_load"), f"line {node.lineno}"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_module_says_its_job_and_has_no_more_than_one(path):
    text = path.read_text()
    tree = ast.parse(text)
    if tree.body:
        first = (ast.get_docstring(tree) or "").splitlines()
        assert first, "the first line says the module's job"
        assert first[0].endswith((".", ":", "?"))
    assert len(text.splitlines()) <= LONGEST


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_nothing_prints(path):
    calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
    assert not [n.lineno for n in calls if isinstance(n.func, ast.Name) and n.func.id == "print"]
