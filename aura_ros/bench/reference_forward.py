"""The forward pass as the reference does it, the naive twin of `OftModel.forward`: same weights, same result, more work.

Source: modeling_prismatic.py of moojink/openvla-oft @213c5ff: one image at a time, every block of both towers, a full
attention mask, every layer's hidden states kept, logits of every position, the prompt tokenised and embedded anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from aura_ros.backbones.openvla_oft.config import OftConfig, TowerConfig
from aura_ros.backbones.openvla_oft.model import EOS_ID, OftModel, OftOutput, pool
from aura_ros.backbones.openvla_oft.vision import Block, Tower


@dataclass(frozen=True)
class Levers:
    """What is left out of the reference's work; all False is the reference.

    one_batch: the images of all cameras in one pass. used_blocks: not the last block of each tower. no_logits: no
    lm_head, no hidden states kept. no_mask: attention without a mask, which the flash kernels need. kept_ids:
    the prompt's ids are kept on the device.
    """

    one_batch: bool = False
    used_blocks: bool = False
    no_logits: bool = False
    no_mask: bool = False
    kept_ids: bool = False


class UnusedParts(nn.Module):
    """What a reference checkpoint holds besides the network: its output reaches no action.

    Random weights, for only the time they take matters. Raises `UserError` for sizes no network can have.
    """

    def __init__(self, config: OftConfig, *, seed: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        with torch.device("meta"):
            self.dino_block = Block(config.dino)
            self.siglip_block = Block(config.siglip)
            self.lm_head = nn.Linear(config.language.hidden, config.language.vocab, bias=False)
        self.to_empty(device=device).to(dtype)
        generator = torch.Generator(device).manual_seed(seed)
        for parameter in self.parameters():
            parameter.requires_grad_(False).normal_(std=0.02, generator=generator)


class ReferenceForward:
    """One query at a time, for the L1 head without FiLM."""

    def __init__(
        self, model: OftModel, unused: UnusedParts, encode: Callable[[], list[int]], levers: Levers
    ) -> None:
        """encode: makes the prompt's ids, BOS first and the empty-space id last."""
        self._model, self._unused, self._encode, self._levers = model, unused, encode, levers
        self._device = next(model.parameters()).device
        self._kept: Tensor | None = self._ids() if levers.kept_ids else None

    @torch.inference_mode()
    def __call__(self, pixel_values: Tensor, proprio: Tensor | None) -> OftOutput:
        """pixel_values: [1, 6 n, H, W]; proprio: [1, proprio_dim], both of the model's dtype, on its device."""
        model = self._model
        ids = self._ids() if self._kept is None else self._kept
        words = model.language_model.embed(ids)
        rows = [model.projector(self._patches(pixel_values))]
        if model.proprio_projector is not None:
            rows.append(model.proprio_projector(proprio)[:, None])
        placeholders = words.new_zeros(1, model.config.placeholders, words.shape[-1])
        eos = model.language_model.embed(torch.tensor([[EOS_ID]], device=self._device))
        embeds = torch.cat([words[:, :1], *rows, words[:, 1:], placeholders, eos], dim=1)
        hidden_states = self._trunk(embeds)
        return OftOutput(
            hidden_states, pool(hidden_states, None), model.action_head(model.action_rows(hidden_states, ids))
        )

    def _ids(self) -> Tensor:
        return torch.tensor([self._encode()], dtype=torch.int64, device=self._device)

    def _patches(self, pixel_values: Tensor) -> Tensor:
        """[1, 6 n, H, W] -> [1, n x patches, both widths]."""
        images = pixel_values.reshape(-1, 6, *pixel_values.shape[2:])
        batches = [images] if self._levers.one_batch else list(images.split(1))
        features = torch.cat([self._features(batch) for batch in batches])
        return features.reshape(1, -1, features.shape[-1])

    def _features(self, images: Tensor) -> Tensor:
        """[n, 6, H, W] -> [n, patches, both widths]."""
        model, unused = self._model.vision_backbone, self._unused
        config = self._model.config
        towers = (
            (model.featurizer, config.dino, unused.dino_block),
            (model.fused_featurizer, config.siglip, unused.siglip_block),
        )
        return torch.cat(
            [
                self._tower(tower, sizes, last, part)
                for (tower, sizes, last), part in zip(towers, images.split(3, dim=1), strict=True)
            ],
            dim=2,
        )

    def _tower(self, tower: Tower, sizes: TowerConfig, last: Block, images: Tensor) -> Tensor:
        x = tower.patch_embed(images) + tower.pos_embed
        prefix = [
            token.expand(len(x), -1, -1) for token in (tower.cls_token, tower.reg_token) if token is not None
        ]
        x = torch.cat([*prefix, x], dim=1)
        blocks = [*tower.blocks] if self._levers.used_blocks else [*tower.blocks, last]
        outputs = []
        for block in blocks:
            x = block(x)
            outputs.append(x)
        return outputs[sizes.depth - 2][:, sum(token.shape[1] for token in prefix) :]

    def _trunk(self, embeds: Tensor) -> Tensor:
        rows = embeds.shape[1]
        side = 1 if self._levers.no_mask else rows
        output = self._model.language_model.model(
            inputs_embeds=embeds,
            attention_mask=torch.ones(1, 1, side, side, dtype=torch.bool, device=self._device),
            position_ids=torch.arange(rows, device=self._device)[None],
            use_cache=False,
            output_hidden_states=not self._levers.no_logits,
        )
        if self._levers.no_logits:
            return output.last_hidden_state
        self._unused.lm_head(output.hidden_states[-1])
        return output.hidden_states[-1]
