"""Bags: writing, reading and summaries. Imports neither rclpy nor torch."""
