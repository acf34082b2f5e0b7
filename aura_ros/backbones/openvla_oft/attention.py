"""Attention over every row, as vision towers and trunk share it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def attend(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Each [B, heads, S, head_dim] -> [B, heads, S, head_dim]; mask: added to the scores, None: no padding."""
    if query.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
        # The backward pass of a CPU's bfloat16 kernel takes three times as long as float32's.
        with torch.autocast("cpu", enabled=False):
            q, k, v = query.float(), key.float(), value.float()
            added = mask.float() if mask is not None and mask.is_floating_point() else mask
            mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=added, scale=scale)
            return mixed.to(query.dtype)
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
