# Two commands for a newcomer: `make demo` and `make test`. Everything lands in .venv and runs/.
VENV ?= .venv
PYTHON ?= python3
PY := $(VENV)/bin/python
EXTRAS := libero test train
SOURCES := $(shell find aura_ros msg srv action launch config checkpoints resource -type f -not -name '*.pyc')
export MUJOCO_GL ?= osmesa
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: demo test test-all test-launch test-jazzy lint install clean
.DEFAULT_GOAL := help

help:
	@echo "make demo         one real LIBERO task that needs a memory, solved through ROS 2; leaves a bag and pictures under runs/"
	@echo "make test         the test suite (about 10 minutes on 2 cores)"
	@echo "make test-all     the same with the slow tests; installs Ray for them"
	@echo "make test-launch LAUNCH_SRC=DIR   launch tests against the launch sources in DIR"
	@echo "make test-jazzy   the ROS tests on Jazzy's wheels, in .venv-jazzy"
	@echo "make lint         ruff and mypy"

demo: install
	$(VENV)/bin/aura sim --suite cue_place --task 0 --init-state 40 --cue 1

test: install
	$(PY) -m pytest -m "not slow"

test-all: install
	$(PY) tools/requirements.py ray > $(VENV)/requirements-all.txt
	$(PY) -m pip install -q -c constraints.txt -r $(VENV)/requirements-all.txt
	$(PY) -m pytest

test-launch: install
	@test -d "$(LAUNCH_SRC)" || { echo "test-launch: LAUNCH_SRC='$(LAUNCH_SRC)' is not a folder; give one with checkouts of ros2/launch, ros2/launch_ros, ros2/ros2cli, ros2/rosidl_runtime_py and ros2/rcl_interfaces"; exit 2; }
	$(PY) tools/launch_prefix.py "$(LAUNCH_SRC)" build/launch $(PY) -m pytest -v test/launch

test-jazzy:
	@test -x .venv-jazzy/bin/python || $(PYTHON) -m venv .venv-jazzy
	.venv-jazzy/bin/python tools/requirements.py --ros jazzy test > .venv-jazzy/requirements.txt
	grep -v '^ros-' constraints.txt > .venv-jazzy/constraints.txt
	.venv-jazzy/bin/python -m pip install -q -c .venv-jazzy/constraints.txt -r .venv-jazzy/requirements.txt
	ROS_DISTRO=jazzy .venv-jazzy/bin/python -m pip install -q --no-build-isolation --no-deps --force-reinstall .
	ROS_DISTRO=jazzy .venv-jazzy/bin/python -m pytest -m "not slow" test/ros

lint: install
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

install: $(VENV)/.package

$(VENV)/.deps: pyproject.toml constraints.txt tools/requirements.py
	@sh tools/system_packages.sh
	@test -x $(PY) || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "aura_ros: Python %d.%d is too old; 3.10 or newer is needed (make PYTHON=python3.11 ...)" % sys.version_info[:2])'
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) tools/requirements.py $(EXTRAS) > $(VENV)/requirements.txt
	@echo "installing about 3.5 GB of packages into $(VENV); a few minutes the first time"
	$(PY) -m pip install -q -c constraints.txt -r $(VENV)/requirements.txt
	@touch $@

$(VENV)/.package: $(VENV)/.deps setup.py CMakeLists.txt package.xml $(SOURCES)
	$(PY) -m pip install -q --no-build-isolation --no-deps --force-reinstall .
	@touch $@

clean:
	rm -rf build $(VENV)
