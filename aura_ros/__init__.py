"""A frozen vision-language-action policy with a gated memory, as a ROS 2 package.

Importing this package imports neither torch nor rclpy.
"""

import pkgutil

# The generated message module has this package's name. Extending the path lets
# `python -m pytest` in a source tree find the installed `aura_ros.msg`.
__path__ = pkgutil.extend_path(__path__, __name__)

__version__ = "0.1.0"
