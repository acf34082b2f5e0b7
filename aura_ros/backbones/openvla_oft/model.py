"""The assembled network: images, proprioception and prompt in; hidden states and normalised actions out.

Source: modeling_prismatic.py, action_heads.py and projectors.py of moojink/openvla-oft @213c5ff.
Sequence: [BOS][patches of each image][proprioception][prompt ids 1..L-1][placeholders, all zero][</s>].
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from aura_ros.backbones.openvla_oft.config import OftConfig
from aura_ros.backbones.openvla_oft.heads import L1ActionHead, ProprioProjector, VisionProjector
from aura_ros.backbones.openvla_oft.language import BidirectionalLlama
from aura_ros.backbones.openvla_oft.vision import VisionBackbone
from aura_ros.errors import UserError

EOS_ID = 2


@dataclass(frozen=True)
class OftOutput:
    """One forward pass over a batch.

    hidden_states: [B, S, hidden], final norm. pooled: fp32 [B, hidden], their mean over valid rows.
    actions_normalised: [B, horizon, action_dim].
    """

    hidden_states: Tensor
    pooled: Tensor
    actions_normalised: Tensor


class OftModel(nn.Module):
    """OpenVLA-OFT with the L1 head, of any size; parameter names are the reference's."""

    def __init__(self, config: OftConfig) -> None:
        super().__init__()
        hidden = config.language.hidden
        self.config = config
        self.vision_backbone = VisionBackbone(config)
        self.projector = VisionProjector(config.vision_dim, hidden)
        self.language_model = BidirectionalLlama(config.language)
        self.proprio_projector = ProprioProjector(config.proprio_dim, hidden) if config.proprio_dim else None
        self.action_head = L1ActionHead(hidden, config.action.horizon, config.action.dim)

    def assemble(
        self, input_ids: Tensor, prefix: Tensor, lengths: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Lay out the sequence.

        input_ids: int64 [B, L]. prefix: [B, P, hidden], patches and proprioception. lengths: ids in use per
        sample where prompts differ; the sequences are then padded on the right.
        Returns embeddings [B, S, hidden] and the valid rows, bool [B, S].
        """
        lengths = self._lengths(input_ids, lengths)
        text = self.language_model.embed(input_ids)
        eos = self.language_model.embed(input_ids.new_full((1,), EOS_ID))
        tail = torch.cat([text.new_zeros(self.config.placeholders, text.shape[-1]), eos])
        rows = [
            torch.cat([words[:1], images, words[1:length], tail])
            for words, images, length in zip(text, prefix, lengths, strict=True)
        ]
        embeds = pad_sequence(rows, batch_first=True)
        counts = torch.tensor([len(row) for row in rows], device=embeds.device)
        valid = torch.arange(embeds.shape[1], device=embeds.device)[None] < counts[:, None]
        return embeds, valid

    def action_rows(
        self, hidden_states: Tensor, input_ids: Tensor, lengths: Sequence[int] | None = None
    ) -> Tensor:
        """The rows the head reads, [B, placeholders, hidden]: the last id's, then all but one placeholder's.

        Shifted by one against the placeholders, deliberately: training reads the same rows.
        """
        count = self.config.placeholders
        starts = [self.config.prefix_rows + length - 1 for length in self._lengths(input_ids, lengths)]
        return torch.stack(
            [row[start : start + count] for row, start in zip(hidden_states, starts, strict=True)]
        )

    def forward(
        self,
        input_ids: Tensor,
        pixel_values: Tensor,
        proprio: Tensor | None = None,
        lengths: Sequence[int] | None = None,
    ) -> OftOutput:
        """input_ids int64 [B, L]; pixel_values [B, 6 n, H, W]; proprio normalised [B, proprio_dim]."""
        prefix = self.projector(self.vision_backbone(pixel_values))
        if self.proprio_projector is not None:
            if proprio is None:
                raise UserError(
                    f"proprioception is missing; this model needs {self.config.proprio_dim} values"
                )
            prefix = torch.cat([prefix, self.proprio_projector(proprio)[:, None]], dim=1)
        embeds, valid = self.assemble(input_ids, prefix, lengths)
        hidden_states = self.language_model(embeds, valid)
        weights = valid[..., None].float()
        pooled = (hidden_states.float() * weights).sum(1) / weights.sum(1)
        actions = self.action_head(self.action_rows(hidden_states, input_ids, lengths))
        return OftOutput(hidden_states, pooled, actions)

    @staticmethod
    def _lengths(input_ids: Tensor, lengths: Sequence[int] | None) -> Sequence[int]:
        return [input_ids.shape[1]] * len(input_ids) if lengths is None else lengths


def build_on_meta(config: OftConfig) -> OftModel:
    """The network without storage: names and shapes only, whatever the size."""
    with torch.device("meta"):
        return OftModel(config)


def unused_key(name: str, config: OftConfig) -> bool:
    """True for the tensors of a reference checkpoint that this network never reads."""
    towers = {"featurizer": config.dino.depth, "fused_featurizer": config.siglip.depth}
    match = re.match(r"vision_backbone\.(featurizer|fused_featurizer)\.(.+)", name)
    if match:
        last_block = f"blocks.{towers[match[1]] - 1}."
        return match[2].startswith((last_block, "norm.", "attn_pool."))
    return name == "language_model.lm_head.weight"


def load_weights(
    config: OftConfig,
    tensors: Mapping[str, Tensor],
    *,
    source: str,
    device: torch.device,
    dtype: torch.dtype,
) -> OftModel:
    """Build the network from exactly these tensors, frozen, in `dtype`; the rotary frequencies stay fp32.

    Raises `UserError` naming `source` for a missing or unknown key, a wrong shape, or NaN or infinity.
    """
    model = build_on_meta(config)
    wanted = dict(model.named_parameters())
    missing = sorted(wanted.keys() - tensors.keys())
    if missing:
        raise UserError(
            f"{source} lacks {len(missing)} of {len(wanted)} tensors, first '{missing[0]}'; "
            "use a complete checkpoint"
        )
    unknown = sorted(name for name in tensors.keys() - wanted.keys() if not unused_key(name, config))
    if unknown:
        raise UserError(
            f"{source} has {len(unknown)} tensors this model does not know, first '{unknown[0]}'; "
            "use a checkpoint of this architecture"
        )
    state = {}
    for name, parameter in wanted.items():
        tensor = tensors[name]
        if tensor.shape != parameter.shape:
            raise UserError(
                f"{source}: tensor '{name}' has shape {list(tensor.shape)}; expected {list(parameter.shape)}"
            )
        if not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
            raise UserError(
                f"{source}: tensor '{name}' holds values that are not finite floats; get it again"
            )
        state[name] = tensor.to(device=device, dtype=dtype)
    model.load_state_dict(state, strict=True, assign=True)
    model.language_model.rebuild_rotary()
    return model.to(device).requires_grad_(False).eval()
