"""Print what pyproject.toml requires, one requirement a line: build, run time and the extras named on the command line.

`make` installs these under constraints.txt before the package, so that building it needs no second environment.
"""

import sys
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10: pip carries the same parser
    from pip._vendor import tomli as tomllib


def main() -> None:
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    requirements = project["build-system"]["requires"] + project["project"]["dependencies"]
    for extra in sys.argv[1:]:
        requirements += project["project"]["optional-dependencies"][extra]
    sys.stdout.write("\n".join(requirements) + "\n")


if __name__ == "__main__":
    main()
