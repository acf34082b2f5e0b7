"""Launch tests run on the real launch packages: `make test-launch LAUNCH_SRC=DIR`. Elsewhere they are skipped."""

import os

import pytest


@pytest.fixture(scope="module", autouse=True)
def quiet_ros_graph():
    """A ROS domain of this process's own, on this machine only, with quick discovery."""
    from aura_ros.share import share_directory

    os.environ["ROS_DOMAIN_ID"] = str(100 + os.getpid() % 100)
    os.environ["ROS_AUTOMATIC_DISCOVERY_RANGE"] = "LOCALHOST"
    os.environ["FASTDDS_DEFAULT_PROFILES_FILE"] = str(
        share_directory() / "config" / "fastdds_fast_discovery.xml"
    )
