"""Print what pyproject.toml requires, one requirement a line: build, run time and the extras named on the command line.

usage: python tools/requirements.py [--ros jazzy] [EXTRA ...]

`make` installs these under constraints.txt before the package, so that building it needs no second environment.
"""

import sys
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10: pip carries the same parser
    from pip._vendor import tomli as tomllib


# Build dependencies that Jazzy's wheels have and do not name.
UNNAMED = {
    "jazzy": (
        "ament-cmake-gmock",
        "ament-cmake-gtest",
        "ament-cmake-ros",
        "domain-coordinator",
        "python-cmake-module",
    )
}


def main() -> None:
    arguments, distro = sys.argv[1:], "kilted"
    if arguments[:1] == ["--ros"]:
        distro, arguments = arguments[1], arguments[2:]
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    requirements = project["build-system"]["requires"] + project["project"]["dependencies"]
    for extra in arguments:
        requirements += project["project"]["optional-dependencies"][extra]
    requirements = [text.replace("ros-kilted-", f"ros-{distro}-") for text in requirements]
    requirements += [f"ros-{distro}-{name}" for name in UNNAMED.get(distro, ())]
    sys.stdout.write("\n".join(requirements) + "\n")


if __name__ == "__main__":
    main()
