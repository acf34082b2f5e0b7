"""Install ROS 2's launch packages from a folder of sources into a prefix of their own, for `make test-launch`.

usage: python tools/launch_prefix.py SOURCES PREFIX [COMMAND ...]

Then runs COMMAND with that prefix in its environment, as a sourced workspace would have it.
The wheels on the package index have no launch, launch_ros, launch_testing or ros2cli; their sources are pure Python.
SOURCES is searched for package.xml files, so any layout of checkouts will do. The one that is not Python,
composition_interfaces, is built with CMake as our own messages are.
"""

import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

WANTED = (
    "osrf_pycommon", "rosidl_runtime_py", "composition_interfaces",
    "launch", "launch_xml", "launch_yaml", "launch_testing", "launch_ros", "launch_testing_ros",
    "ros2cli", "ros2pkg", "ros2run", "ros2launch", "ros2topic", "ros2node", "ros2interface", "ros2service",
    "ros2param", "ros2lifecycle",
)  # fmt: skip
NEEDED = (
    "launch",
    "launch_ros",
    "launch_testing",
    "launch_testing_ros",
    "ros2cli",
    "ros2launch",
    "composition_interfaces",
)
# On the package index, where SOURCES lacks them.
FROM_INDEX = {"osrf_pycommon": "osrf-pycommon>=2"}


def find(sources: Path) -> dict[str, Path]:
    found = {}
    for file in sorted(sources.rglob("package.xml")):
        name = ElementTree.parse(file).getroot().findtext("name", "").strip()
        if name in WANTED:
            found.setdefault(name, file.parent)
    return found


def install_python(name: str, requirement: str, prefix: Path) -> None:
    print(f"installing {name}", flush=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--ignore-installed",
        "--prefix",
        str(prefix),
    ]
    isolation = [] if requirement == FROM_INDEX.get(name) else ["--no-build-isolation"]
    subprocess.run([*command, *isolation, requirement], check=True)


def build_interfaces(source: Path, work: Path, prefix: Path) -> None:
    print(f"building {source.name}", flush=True)
    wheels = Path(sys.prefix)
    env = {
        **os.environ,
        "AMENT_PREFIX_PATH": str(wheels),
        "CMAKE_PREFIX_PATH": str(wheels),
        "PATH": f"{wheels / 'bin'}{os.pathsep}{os.environ['PATH']}",
    }
    subprocess.run(
        ["cmake", "-S", str(source), "-B", str(work), "-G", "Ninja", f"-DCMAKE_INSTALL_PREFIX={prefix}",
         "-DBUILD_TESTING=OFF", f"-DPython3_EXECUTABLE={sys.executable}", f"-DPYTHON_EXECUTABLE={sys.executable}"],
        env=env, check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    subprocess.run(
        ["cmake", "--build", str(work), "--target", "install"], env=env, check=True, stdout=subprocess.DEVNULL
    )


def install(sources: Path, prefix: Path) -> None:
    found = find(sources)
    missing = [name for name in NEEDED if name not in found]
    if missing:
        sys.exit(f"launch_prefix: {sources} has no package {', '.join(missing)}; put checkouts of ros2/launch, "
                 "ros2/launch_ros, ros2/ros2cli and ros2/rcl_interfaces there")  # fmt: skip
    shutil.rmtree(prefix, ignore_errors=True)
    for name in WANTED:
        if name not in found:
            if name in FROM_INDEX:
                install_python(name, FROM_INDEX[name], prefix)
            continue
        # Built from copies: a build writes beside the sources, which are not ours.
        copy = prefix / "src" / name
        shutil.copytree(found[name], copy, ignore=shutil.ignore_patterns(".git", "test"))
        if (copy / "setup.py").is_file():
            install_python(name, str(copy), prefix)
        else:
            build_interfaces(copy, prefix / "build" / name, prefix)


def environment(prefix: Path) -> dict[str, str]:
    wheels = Path(sys.prefix)
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    env = {
        **os.environ,
        "AMENT_PREFIX_PATH": f"{prefix}{os.pathsep}{wheels}",
        "PYTHONPATH": str(prefix / "lib" / python / "site-packages"),
        "PATH": os.pathsep.join([str(prefix / "bin"), str(wheels / "bin"), os.environ["PATH"]]),
        "LD_LIBRARY_PATH": os.pathsep.join([str(prefix / "lib"), str(wheels / "lib")]),
        "ROS_DISTRO": "kilted",
        "ROS_VERSION": "2",
        "ROS_PYTHON_VERSION": "3",
    }
    # The wheels' start-up must run again, to find their libraries beside the new ones.
    env.pop("_ROS_WHEELS_BOOTSTRAP_COMPLETE", None)
    return env


def main() -> None:
    if len(sys.argv) < 3 or not Path(sys.argv[1]).is_dir():
        sys.exit(
            "launch_prefix: give the folder with the sources of launch, launch_ros and ros2cli (LAUNCH_SRC=DIR)"
        )
    sources, prefix = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
    complete = prefix / ".complete"
    if not complete.is_file() or complete.read_text() != str(sources):
        install(sources, prefix)
        complete.write_text(str(sources))
    if sys.argv[3:]:
        os.execvpe(sys.argv[3], sys.argv[3:], environment(prefix))


if __name__ == "__main__":
    main()
