"""The only folder that imports rclpy: thin shells around policy, control and simulator."""
