"""Checks before anything is served: mistakes that run, and give actions that look right, fail here instead.

Each is one line that says what is wrong. What each mistake costs was measured on the reference: see the table
in docs/openvla_oft.md.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from aura_ros.backbones.openvla_oft.config import OftConfig
from aura_ros.backbones.openvla_oft.inputs import EMPTY_SPACE_IDS
from aura_ros.backbones.openvla_oft.model import EOS_ID, OftModel
from aura_ros.backbones.openvla_oft.processing import PIXEL_MEAN, PIXEL_STD
from aura_ros.errors import UserError
from aura_ros.types import FloatArray, ImageArray

HINT = "this is a fault of the installation or of changed code: reinstall aura_ros and its requirements"

BOS_ID = 1  # of both tokenizers
# What other kernels may move a normalised action: a hundred times what was measured in fp32; bf16 moves them by 0.04.
ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 0.1}
# Grey levels of the test views. JPEG moves a flat area by a level or two.
DARKEST, BRIGHTER, LEVELS_OFF = 20, 100, 3


def known_views(config: OftConfig) -> dict[str, ImageArray]:
    """One image per camera, uint8 [size, size, 3]: a grey of its own, brighter in the right half."""
    size, views = config.image.size, {}
    for index, camera in enumerate(config.cameras):
        views[camera] = np.full((size, size, 3), _grey(config, index), np.uint8)
        views[camera][:, size // 2 :] += BRIGHTER
    return views


def _grey(config: OftConfig, index: int) -> int:
    return DARKEST + BRIGHTER * index // len(config.cameras)


def check_pixels(config: OftConfig, pixel_values: Tensor) -> None:
    """What was made of `known_views`, [1, 6 n, size, size]: cameras in order, DINOv2's channels before SigLIP's,
    mirrored where the checkpoint wants it. Towers with each other's channels cost 0.73 in the actions.
    """
    if config.image.blank:
        return
    quarter = config.image.size // 4
    left = pixel_values[0, :, :, :quarter].float().mean(dim=(1, 2)).cpu().numpy().reshape(-1, 2, 3)
    greys = [_grey(config, i) + BRIGHTER * config.image.mirror for i in range(len(config.cameras))]
    expected = (np.array(greys, np.float32)[:, None, None] / 255.0 - PIXEL_MEAN) / PIXEL_STD
    if left.shape != expected.shape or (np.abs(left - expected) > LEVELS_OFF / 255.0 / PIXEL_STD).any():
        mirror = "mirrored" if config.image.mirror else "not mirrored"
        raise UserError(
            f"the images are prepared wrongly: expected {list(config.cameras)} in this order, {mirror}, DINOv2's "
            f"three channels before SigLIP's: {HINT}"
        )


def check_accelerated(served: FloatArray, plain: FloatArray, dtype: torch.dtype) -> None:
    """The accelerated network's normalised actions are the plain one's up to rounding; else raises `UserError`."""
    limit = ROUNDING[dtype]
    off = float(np.abs(served - plain).max())
    if not off <= limit:  # also for NaN
        raise UserError(
            f"the accelerated network's actions are off by {off:.2g}, more than rounding ({limit:g}); use "
            "accelerate 'none'"
        )


@torch.inference_mode()
def check_model(model: OftModel, input_ids: Tensor, pixel_values: Tensor) -> None:
    """Run every check of the network; raises `UserError` at the first that fails.

    input_ids: int64 [1, L], a prompt. pixel_values: [1, 6 n, H, W], any images.
    """
    check_prompt(model.config, input_ids)
    model.language_model.check_bidirectional()
    check_rotary(model)
    check_sequence(model, input_ids, pixel_values)
    check_head_rows(model, input_ids)


def check_prompt(config: OftConfig, input_ids: Tensor) -> None:
    """BOS opens the prompt and the empty-space token (Llama's 29871) ends it; without that one costs 0.12."""
    ends, expected = input_ids[0, [0, -1]].tolist(), [BOS_ID, EMPTY_SPACE_IDS[config.tokenizer]]
    if ends != expected:
        raise UserError(f"the prompt begins and ends in the tokens {ends}, not in {expected}: {HINT}")


def check_rotary(model: OftModel) -> None:
    """The rotary frequencies are fp32 and those of `rope_theta`; in bf16 they move the actions by 0.015."""
    config = model.config.language
    frequencies = model.language_model.model.rotary_emb.inv_freq
    per_head = config.hidden // config.heads
    powers = torch.arange(0, per_head, 2, dtype=torch.float32) / per_head
    expected = (1.0 / config.rope_theta**powers).to(frequencies.device)
    if frequencies.dtype != torch.float32 or not torch.allclose(frequencies, expected, rtol=1e-5, atol=0):
        raise UserError(
            f"the rotary frequencies are {frequencies.dtype} and off by up to "
            f"{(frequencies.float() - expected).abs().max():.2g}; they must be float32: {HINT}"
        )


def check_sequence(model: OftModel, input_ids: Tensor, pixel_values: Tensor) -> None:
    """BOS, images, proprioception, the prompt up to its last id, zeroed placeholders, </s>: each in its place."""
    config, embed = model.config, model.language_model.embed
    weight = embed(input_ids)
    proprio = weight.new_zeros(1, config.proprio_dim) if config.proprio_dim else None
    prefix = model.prefix(input_ids, pixel_values.to(weight), proprio)
    if config.head == "diffusion":  # the row of the noise level
        prefix = torch.cat([prefix, prefix.new_zeros(1, 1, prefix.shape[-1])], dim=1)
    embeds, _ = model.assemble(input_ids, prefix)
    count, images = config.placeholders, config.prefix_rows
    rows = 1 + images + (input_ids.shape[1] - 1) + count + 1
    if prefix.shape[1] != images or embeds.shape[1] != rows:
        raise UserError(
            f"the sequence has {embeds.shape[1]} rows, {prefix.shape[1]} before the prompt; {len(config.cameras)} cameras "
            f"and the prompt make {rows} and {images}: {HINT}"
        )
    prompt = embeds[:, 1 + images : rows - 1 - count]
    parts = {
        "the first row is not BOS": torch.equal(embeds[:, 0], weight[:, 0]),
        "the prompt is not where it belongs": torch.equal(prompt, weight[:, 1:]),
        "the placeholders are not zero": not embeds[:, rows - 1 - count : rows - 1].any(),
        "the last row is not </s>": torch.equal(embeds[0, -1], embed(input_ids.new_tensor(EOS_ID))),
    }
    for wrong, holds in parts.items():
        if not holds:
            raise UserError(f"the sequence is laid out wrongly: {wrong}; {HINT}")


def check_head_rows(model: OftModel, input_ids: Tensor) -> None:
    """The head reads from the prompt's last row on, as in training; one row further costs 0.19 in the actions."""
    config = model.config
    last_id = config.prefix_rows + input_ids.shape[1] - 1
    rows = torch.arange(last_id + config.placeholders + 2, device=input_ids.device)[None, :, None]
    read = model.action_rows(rows, input_ids).flatten()
    expected = torch.arange(last_id, last_id + config.placeholders, device=read.device)
    if not torch.equal(read, expected):
        raise UserError(
            f"the head reads rows {int(read[0])} to {int(read[-1])} of the sequence; trained on {last_id} to "
            f"{last_id + config.placeholders - 1}: {HINT}"
        )
