"""Choosing observations, counting and timing: plain objects with an injected clock, no rclpy, no torch."""
