"""The example policy for SROS 2 allows what the nodes do, no more and no less."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

pytest.importorskip("rclpy", reason="rclpy is not installed")
pytest.importorskip("aura_ros.msg", reason="the messages are not built")

from rclpy.parameter import Parameter

from aura_ros.nodes.chunk_player import ChunkPlayer
from aura_ros.nodes.policy_node import PolicyNode

FILE = Path(__file__).resolve().parents[2] / "config" / "sros2" / "policy.xml"
# Some distributions have it, others not.
NOT_EVERYWHERE = {"get_type_description"}


def allowed(node):
    """(kind, what) -> full names, as the file says."""
    (profile,) = [p for p in ElementTree.parse(FILE).iter("profile") if p.get("node") == node]
    found = {}
    for group in profile:
        (verb,) = group.attrib
        names = {name(item.text, node) for item in group}
        found[group.tag, verb] = {n for n in names if n.rsplit("/", 1)[-1] not in NOT_EVERYWHERE}
    return found


def name(text, node):
    return text if text.startswith("/") else f"/{text.replace('~', node)}"


def does(node, own):
    """The same, as the graph says."""

    def names(pairs):
        # An action's topics and services follow from its name.
        return {n for n, _ in pairs if "/_action/" not in n and n.rsplit("/", 1)[-1] not in NOT_EVERYWHERE}

    found = {
        ("topics", "publish"): names(own.get_publisher_names_and_types_by_node(node, "/")),
        ("topics", "subscribe"): names(own.get_subscriber_names_and_types_by_node(node, "/")),
        ("services", "reply"): names(own.get_service_names_and_types_by_node(node, "/")),
    }
    actions = {
        n.split("/_action/")[0]
        for n, _ in own.get_service_names_and_types_by_node(node, "/")
        if "/_action/" in n
    }
    return {**found, ("actions", "execute"): actions} if actions else found


@pytest.mark.parametrize("kind", [PolicyNode, ChunkPlayer], ids=lambda kind: kind.__name__)
def test_the_policy_allows_what_the_node_does_by_its_exact_names(ros, kind):
    options = [Parameter("publish_latent", value=True)] if kind is PolicyNode else []
    node = ros.add(kind(parameter_overrides=options))
    node.trigger_configure()
    watcher = ros.node("watcher")
    own = node.get_name()
    ros.spin_until(lambda: own in watcher.get_node_names(), what="the node in the graph")
    # With simulated time only.
    expected = {kind: names - {"/clock"} for kind, names in allowed(own).items()}
    ros.spin_until(
        lambda: {kind: names - {"/clock"} for kind, names in does(own, watcher).items()} == expected,
        timeout=10,
        what=f"{does(own, watcher)} as {expected}",
    )
