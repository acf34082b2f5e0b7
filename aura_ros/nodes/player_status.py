"""What the chunk player says of itself: its state and diagnostics. The caller stamps both."""

from __future__ import annotations

from collections.abc import Mapping

from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus, KeyValue

from aura_ros.control.playback import PlayState
from aura_ros.control.player import Command, Player
from aura_ros.msg import ChunkState

LEVELS = {
    PlayState.IDLE: DiagnosticStatus.OK,
    PlayState.PLAYING: DiagnosticStatus.OK,
    PlayState.HOLDING: DiagnosticStatus.WARN,
    PlayState.FAULT: DiagnosticStatus.ERROR,
}


def chunk_state(player: Player, command: Command | None) -> ChunkState:
    """After a command was sent; None: at the end."""
    state, reason = player.state
    msg = ChunkState(state=int(state), reason=reason)
    chunk = player.playback.chunk
    if chunk is not None:
        msg.epoch, msg.sequence = chunk.epoch, chunk.sequence
        msg.rows_left = player.playback.rows_left
    if command is not None and command.row is not None:
        msg.row = command.row.row
    return msg


def diagnostics(
    node_name: str, state: tuple[PlayState, str] | None, values: Mapping[str, object]
) -> DiagnosticArray:
    """For `/diagnostics` and its aggregators. state: and the reason; None: the player is inactive."""
    level, message = DiagnosticStatus.OK, "inactive"
    if state is not None:
        level, message = LEVELS[state[0]], state[0].name.lower()
        message += f": {state[1]}" if state[1] else ""
    entry = DiagnosticStatus(
        level=level, name=f"{node_name.lstrip('/')}: player", message=message, hardware_id=node_name
    )
    entry.values = [KeyValue(key=key, value=str(value)) for key, value in values.items()]
    return DiagnosticArray(status=[entry])
