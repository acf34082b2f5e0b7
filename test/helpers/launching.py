"""Running a launch file as a user does, and ending whatever it started."""

import os
import re
import signal
import subprocess
import time


def start(tmp_path, file, *arguments):
    """`ros2 launch aura_ros FILE`, in a session of its own, its output in a file that can be read while it runs."""
    log = tmp_path / "launch.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["ros2", "launch", "aura_ros", file, *arguments],
            cwd=tmp_path,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return process, log


def wait_for(condition, timeout, what):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {timeout} s"
        time.sleep(0.05)


def end(process):
    """Leave no process behind, whatever the test came to."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def child(log, name):
    """The process id of a node, from launch's own words."""
    return int(re.search(rf"\[{name}-\d+\]: process started with pid \[(\d+)\]", log.read_text())[1])


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def check_refused(tmp_path, file, argument, said):
    """A bad argument ends the launch with status 1 and one line, and starts nothing."""
    process, log = start(tmp_path, file, argument)
    try:
        assert process.wait(timeout=60) == 1
    finally:
        end(process)
    text = log.read_text()
    assert said in text
    assert "process started" not in text
    assert "Traceback" not in text
