"""Orientations as vision-language-action policies read them: quaternion to axis-angle, with one sign.

Quaternions are [x, y, z, w] everywhere, the order of `geometry_msgs/Quaternion` and of robosuite
(MuJoCo's own arrays are [w, x, y, z] and never leave the simulator).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from aura_ros.errors import UserError

IDENTITY_XYZW = (0.0, 0.0, 0.0, 1.0)

# A gripper that points down is half a turn about x from the world, so w is about 0 and changes sign
# all the time. LIBERO's data were recorded on the continuous branch around this orientation (angles
# from about 2.5 to 3.7 rad); the branch w >= 0 would flip the vector's sign in the middle of a grasp.
GRIPPER_DOWN_XYZW = (1.0, 0.0, 0.0, 0.0)


def quaternion_to_axis_angle(
    quaternion_xyzw: npt.ArrayLike, reference_xyzw: npt.ArrayLike = IDENTITY_XYZW
) -> npt.NDArray[np.float64]:
    """Rotation vector (unit axis times angle) of a quaternion, the same for both of its signs.

    q and -q are one rotation but give two vectors. Of the two signs, the one on the side of
    `reference_xyzw` is taken (dot product >= 0; on the border, the one whose first non-zero component
    is positive). With the default, the identity, that is w >= 0 and an angle in [0, pi]. With
    `GRIPPER_DOWN_XYZW` it is the branch that LIBERO checkpoints were trained on.

    For a quaternion already of that sign the result is that of robosuite's
    `transform_utils.quat2axisangle`, which OpenVLA-OFT's LIBERO evaluation uses.

    Args:
        quaternion_xyzw: [4], x, y, z, w. Normalised here.
        reference_xyzw: [4], x, y, z, w; which of the two signs to take.

    Returns:
        float64 [3], radians. [0, 0, 0, 1] gives zeros.

    Raises:
        UserError: not four finite numbers, or all zero.
    """
    quaternion = np.asarray(quaternion_xyzw, dtype=np.float64)
    if quaternion.shape != (4,) or not np.isfinite(quaternion).all():
        raise UserError(f"quaternion {quaternion.tolist()} must be four finite numbers [x, y, z, w]")
    norm = float(np.linalg.norm(quaternion))
    if norm < 1e-6:
        raise UserError(
            f"quaternion {quaternion.tolist()} is zero; an orientation [x, y, z, w] has length 1 "
            "(no rotation is [0, 0, 0, 1])"
        )
    quaternion = quaternion / norm
    side = float(quaternion @ np.asarray(reference_xyzw, dtype=np.float64))
    if side == 0.0:
        side = float(quaternion[np.flatnonzero(quaternion)[0]])
    if side < 0.0:
        quaternion = -quaternion
    vector, w = quaternion[:3], float(quaternion[3])
    sine = float(np.linalg.norm(vector))
    if sine == 0.0:
        return np.zeros(3)
    return vector * (2.0 * float(np.arctan2(sine, w)) / sine)
