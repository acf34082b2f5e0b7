"""The gated policy on a robot: policy and player, configured and activated; the policy infers after ~/enable.

ros2 launch aura_ros policy.launch.py config:=my_robot.yaml instruction:="put the cup on the plate"
ros2 service call /policy_node/enable std_srvs/srv/SetBool "{data: true}"

An argument that is left out keeps the value in the YAML file, and what the file leaves out has its default.
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
from launch_ros.parameter_descriptions import ParameterValue
from lifecycle_msgs.msg import Transition

from aura_ros.config import from_text
from aura_ros.errors import UserError
from aura_ros.nodes.options import POLICY_OPTIONS, ROBOT_OPTIONS, read_options
from aura_ros.nodes.player_config import PlayerConfig
from aura_ros.nodes.policy_config import PolicyNodeConfig
from aura_ros.share import share_directory

OPTIONS = {**POLICY_OPTIONS, **ROBOT_OPTIONS}


def config_file(text):
    """A path, or the name of a file in the package's config/robots. Raises UserError."""
    shipped = share_directory() / "config" / "robots"
    for path in (Path(text), shipped / text, shipped / f"{text}.yaml"):
        if path.is_file():
            return str(path.resolve())
    names = ", ".join(sorted(path.stem for path in shipped.glob("*.yaml")))
    raise UserError(f"config '{text}' does not exist; give a YAML file, or one of: {names}")


def bag_directory(text):
    """Where to record, or None: `record` is a directory, true (runs/<time>/bag) or false."""
    if text.lower() in ("", "false"):
        return None
    if text.lower() == "true":
        return Path("runs") / time.strftime("%Y%m%d-%H%M%S") / "bag"
    return Path(text)


def set_up(context):
    arguments = context.launch_configurations
    files = [config_file(arguments["config"])] if arguments["config"] else []
    values = read_options(arguments, PolicyNodeConfig, OPTIONS, not_given="")
    # Text stays text: launch would read "yes", "null" and "3.0" as YAML.
    given = {
        name.replace("__", "."): ParameterValue(value, value_type=str) if isinstance(value, str) else value
        for name, value in values.items()
    }
    PolicyNodeConfig(**values).check_files()
    bag = bag_directory(arguments["record"])
    waits = {} if bag is None else {"wait_for_recorder": "gate_recorder"}
    leaves = {"exit_on_configure_failure": True}
    common = {"package": "aura_ros", "namespace": arguments["namespace"], "output": "screen"}
    policy = LifecycleNode(
        executable="policy_node", name="policy_node", parameters=[*files, given, waits, leaves], **common
    )
    # A word that is neither is no "false": it would drive the arm.
    shadow = {"shadow": from_text(PlayerConfig, "shadow", arguments["shadow"])} if arguments["shadow"] else {}
    player = LifecycleNode(
        executable="chunk_player", name="chunk_player", parameters=[*files, shadow, leaves], **common
    )
    nodes = [policy, player]
    if bag is not None:
        bag.resolve().parent.mkdir(parents=True, exist_ok=True)
        recording = {"output": str(bag.resolve())}
        nodes.append(
            Node(executable="gate_recorder", name="gate_recorder", parameters=[*files, recording], **common)
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

    def transition(node, which):
        return EmitEvent(event=ChangeState(lifecycle_node_matcher=matches_action(node), transition_id=which))

    handlers = [RegisterEventHandler(OnProcessExit(target_action=node, on_exit=end)) for node in nodes]
    for node in (policy, player):
        configure = OnProcessStart(
            target_action=node, on_start=[transition(node, Transition.TRANSITION_CONFIGURE)]
        )
        activate = OnStateTransition(
            target_lifecycle_node=node,
            start_state="configuring",
            goal_state="inactive",
            entities=[transition(node, Transition.TRANSITION_ACTIVATE)],
        )
        handlers += [RegisterEventHandler(configure), RegisterEventHandler(activate)]
    # The handlers first: a node may be quicker than its handler's registration.
    return [*handlers, *nodes]


def generate_launch_description():
    fields = PolicyNodeConfig.__dataclass_fields__
    return LaunchDescription(
        [
            DeclareLaunchArgument(
                "config",
                default_value="",
                description="YAML file of both nodes' parameters, or one of config/robots: franka_servo, ur_trajectory, "
                "so101_position",
            ),
            *(
                DeclareLaunchArgument(
                    name, default_value="", description=fields[field].metadata["description"]
                )
                for name, field in OPTIONS.items()
            ),
            DeclareLaunchArgument(
                "namespace", default_value="", description="of all nodes; topics follow it"
            ),
            DeclareLaunchArgument(
                "shadow",
                default_value="false",
                description="true: the player publishes everything but commands",
            ),
            DeclareLaunchArgument(
                "record", default_value="", description="bag directory, true (runs/<time>/bag) or false"
            ),
            OpaqueFunction(function=set_up),
        ]
    )
