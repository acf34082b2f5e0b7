"""Frozen policies behind one interface: an observation becomes a hidden state and a base chunk.

Importing this package imports no torch; `load_backbone` does when it is called. Other packages add backbones by entry
points, see docs/other_backbones.md.
"""

from aura_ros.backbones.base import Backbone
from aura_ros.backbones.registry import BACKBONES, KNOWN_BACKBONES, load_backbone

__all__ = ["BACKBONES", "KNOWN_BACKBONES", "Backbone", "load_backbone"]
