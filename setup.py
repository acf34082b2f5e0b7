"""The pip front door: runs the same CMakeLists.txt as colcon and packs what it installs.

For people who have pip and no ROS: the ROS wheels in the build environment are the ament prefix.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

SOURCE = Path(__file__).resolve().parent
CMAKE_SOURCES = (
    "CMakeLists.txt", "package.xml", "msg", "srv", "action", "aura_ros", "launch", "config",
    "checkpoints", "resource",
)  # fmt: skip


def ros_prefix() -> Path:
    """The directory whose share/ and lib/ hold the ROS wheels (a venv, or pip's build environment)."""
    spec = importlib.util.find_spec("ament_package")
    if spec is None or spec.origin is None:
        raise SystemExit(
            "aura_ros: the ROS wheels needed to build the messages are missing; install without "
            "--no-build-isolation, or install the [build-system] requires of pyproject.toml first"
        )
    return Path(spec.origin).parents[4]


def mend_wheel_exports(prefix: Path) -> None:
    """Point the wheels' CMake exports at this interpreter: they carry the paths of the machine that built them."""
    import numpy

    def local(match: re.Match) -> str:
        return numpy.get_include() if "numpy" in match.group(0) else sysconfig.get_paths()["include"]

    for export in prefix.glob("share/*/cmake/*Export*.cmake"):
        text = export.read_text()
        mended = re.sub(r"/opt/python/cp[^;\"\s]*", local, text)
        if mended != text:
            temporary = export.with_suffix(".mended")
            temporary.write_text(mended)
            os.replace(temporary, export)


def cached_for(work: Path, source: Path, prefix: Path) -> bool:
    """Whether the CMake cache in `work` was made from this source with the ROS wheels in `prefix`."""
    cache = work / "CMakeCache.txt"
    text = cache.read_text() if cache.is_file() else ""
    return f"CMAKE_HOME_DIRECTORY:INTERNAL={source}\n" in text and f"{prefix}/" in text


class BuildWithCMake(build_py):
    """Build the messages and merge our modules into them, as `colcon build` does."""

    def run(self):
        prefix = ros_prefix()
        mend_wheel_exports(prefix)
        work = Path(self.get_finalized_command("build").build_temp).resolve() / "cmake"
        stage = work / "install"
        # CMake refuses to export include paths that lie in its source directory, where a .venv often is.
        source = work.with_name("source")
        # In the user's own venv the CMake build is kept, so that a second install takes seconds; in pip's
        # throw-away build environment its cache would name paths that are gone.
        keep = prefix == Path(sys.prefix) and cached_for(work, source, prefix)
        shutil.rmtree(stage if keep else work, ignore_errors=True)
        shutil.rmtree(source, ignore_errors=True)
        source.mkdir(parents=True)
        for name in CMAKE_SOURCES:
            copy = shutil.copytree if (SOURCE / name).is_dir() else shutil.copy2
            copy(SOURCE / name, source / name)
        env = {
            **os.environ,
            "AMENT_PREFIX_PATH": str(prefix),
            "CMAKE_PREFIX_PATH": str(prefix),
            "LD_LIBRARY_PATH": os.pathsep.join(
                [str(prefix / "lib"), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
            ),
            "ROS_DISTRO": os.environ.get("ROS_DISTRO", "kilted"),
            "ROS_VERSION": "2",
            "ROS_PYTHON_VERSION": "3",
            "_ROS_WHEELS_BOOTSTRAP_COMPLETE": "1",
            "PATH": os.pathsep.join([str(prefix / "bin"), os.environ.get("PATH", "")]),
        }
        configure = [
            "cmake", "-S", str(source), "-B", str(work), "-G", "Ninja",
            f"-DCMAKE_INSTALL_PREFIX={stage}", "-DCMAKE_BUILD_TYPE=Release", "-DBUILD_TESTING=OFF",
            f"-DPython3_EXECUTABLE={sys.executable}", f"-DPYTHON_EXECUTABLE={sys.executable}",
        ]  # fmt: skip
        subprocess.run(configure, env=env, check=True)
        subprocess.run(["cmake", "--build", str(work), "--target", "install"], env=env, check=True)

        (package,) = stage.glob("**/*-packages/aura_ros")
        target = Path(self.build_lib) / "aura_ros"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(package, target, ignore=shutil.ignore_patterns("__pycache__"))
        data: dict[str, list[str]] = {}
        for path in sorted(p for p in stage.rglob("*") if p.is_file()):
            relative = path.relative_to(stage)
            # The build environment is gone after the build: an index entry naming it would mislead.
            if "-packages" in str(relative) or "parent_prefix_path" in relative.parts:
                continue
            data.setdefault(str(relative.parent), []).append(os.path.relpath(path, SOURCE))
        self.distribution.data_files = sorted(data.items())


class BinaryDistribution(Distribution):
    def has_ext_modules(self):
        return True


setup(
    packages=["aura_ros"],
    cmdclass={"build_py": BuildWithCMake},
    distclass=BinaryDistribution,
    data_files=[],
)
