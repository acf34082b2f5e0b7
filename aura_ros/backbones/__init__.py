"""Frozen policies behind one interface: an observation becomes a hidden state and a base chunk.

Importing this package imports no torch; `load_backbone` does when it is called.
"""

from aura_ros.backbones.base import Backbone
from aura_ros.backbones.registry import BACKBONES, load_backbone

__all__ = ["BACKBONES", "Backbone", "load_backbone"]
