"""One real LIBERO episode: simulator, policy and recorder; all end when the episode does.

ros2 launch aura_ros libero_sim.launch.py suite:=libero_10 task:=0 init_state:=1 seed:=5

An argument that is left out keeps the value in config/libero_sim.yaml.
"""

import time
from pathlib import Path

from launch import LaunchDescription
from launch.actions import DeclareLaunchArgument, EmitEvent, OpaqueFunction, RegisterEventHandler
from launch.event_handlers import OnProcessExit, OnProcessStart
from launch.events import Shutdown, matches_action
from launch_ros.actions import LifecycleNode, Node
from launch_ros.event_handlers import OnStateTransition
from launch_ros.events.lifecycle import ChangeState
from lifecycle_msgs.msg import Transition

from aura_ros.nodes.options import POLICY_OPTIONS, SIM_OPTIONS, read_options, same_limit
from aura_ros.nodes.policy_config import PolicyNodeConfig
from aura_ros.nodes.sim_config import SimNodeConfig
from aura_ros.share import share_directory


def given(context, config_type, options):
    """The node's parameters for the arguments that were given."""
    values = read_options(context.launch_configurations, config_type, options, not_given="")
    return {field.replace("__", "."): value for field, value in values.items()}


def bag_directory(text):
    """Where to record, or None: `record` is a directory, true (runs/<time>/bag) or false."""
    if text.lower() == "false":
        return None
    if text.lower() in ("", "true"):
        return Path("runs") / time.strftime("%Y%m%d-%H%M%S") / "bag"
    return Path(text)


def set_up(context):
    config = str(share_directory() / "config" / "libero_sim.yaml")
    policy_parameters = given(context, PolicyNodeConfig, POLICY_OPTIONS)
    sim_parameters = same_limit(given(context, SimNodeConfig, SIM_OPTIONS), policy_parameters)
    # An episode or a file that does not exist is refused before anything starts.
    SimNodeConfig(**sim_parameters)
    PolicyNodeConfig(**{name.replace(".", "__"): v for name, v in policy_parameters.items()}).check_files()
    namespace = context.launch_configurations["namespace"]
    sim_python = context.launch_configurations["sim_python"]
    bag = bag_directory(context.launch_configurations["record"])
    policy_parameters["wait_for_recorder"] = "" if bag is None else "gate_recorder"

    policy = LifecycleNode(
        package="aura_ros",
        executable="policy_node",
        name="policy_node",
        namespace=namespace,
        parameters=[config, policy_parameters],
        output="screen",
    )
    nodes = [
        policy,
        Node(
            package="aura_ros",
            executable="libero_sim",
            name="libero_sim",
            namespace=namespace,
            parameters=[config, sim_parameters],
            additional_env={"AURA_ROS_PYTHON": sim_python} if sim_python else None,
            output="screen",
        ),
    ]
    if bag is not None:
        bag.resolve().parent.mkdir(parents=True, exist_ok=True)
        nodes.append(
            Node(
                package="aura_ros",
                executable="gate_recorder",
                name="gate_recorder",
                namespace=namespace,
                parameters=[config, {"output": str(bag.resolve())}],
                output="screen",
            )
        )

    def transition(which):
        return EmitEvent(
            event=ChangeState(lifecycle_node_matcher=matches_action(policy), transition_id=which)
        )

    over = []

    def end(event, _context):
        """Whoever ends first ends all; its failure ends the launch with status 1."""
        if over:
            return []
        over.append(event.process_name)
        if event.returncode:
            raise RuntimeError(f"{event.process_name} ended with status {event.returncode}")
        return [EmitEvent(event=Shutdown(reason=f"{event.process_name} has ended"))]

    handlers = [
        OnProcessStart(target_action=policy, on_start=[transition(Transition.TRANSITION_CONFIGURE)]),
        OnStateTransition(
            target_lifecycle_node=policy,
            start_state="configuring",
            goal_state="inactive",
            entities=[transition(Transition.TRANSITION_ACTIVATE)],
        ),
        *(OnProcessExit(target_action=node, on_exit=end) for node in nodes),
    ]
    # The handlers first: a node may be quicker than its handler's registration.
    return [*(RegisterEventHandler(handler) for handler in handlers), *nodes]


def generate_launch_description():
    def described(config_type, options):
        fields = config_type.__dataclass_fields__
        return [
            DeclareLaunchArgument(name, default_value="", description=fields[field].metadata["description"])
            for name, field in options.items()
        ]

    return LaunchDescription(
        [
            *described(SimNodeConfig, SIM_OPTIONS),
            *described(PolicyNodeConfig, POLICY_OPTIONS),
            DeclareLaunchArgument(
                "record", default_value="", description="bag directory, true (runs/<time>/bag) or false"
            ),
            DeclareLaunchArgument("namespace", default_value="", description="of all three nodes"),
            DeclareLaunchArgument(
                "sim_python",
                default_value="",
                description="interpreter of the simulator, if LIBERO lives in an environment of its own",
            ),
            OpaqueFunction(function=set_up),
        ]
    )
