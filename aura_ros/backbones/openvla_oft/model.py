"""The assembled network: images, proprioception and prompt in; hidden states and normalised actions out.

Source: modeling_prismatic.py, action_heads.py and projectors.py of moojink/openvla-oft @213c5ff.
Sequence: [BOS][patches of each image][proprioception][diffusion step][prompt ids 1..L-1][placeholders][</s>];
the placeholders are zero, or noisy actions with a diffusion head.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from aura_ros.backbones.openvla_oft.config import OftConfig
from aura_ros.backbones.openvla_oft.diffusion import ddim_step, signal_shares, step_embedding, timesteps
from aura_ros.backbones.openvla_oft.heads import (
    DiffusionActionHead,
    DiscreteActions,
    L1ActionHead,
    NoisyActionProjector,
    ProprioProjector,
    VisionProjector,
)
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
    """OpenVLA-OFT of any size and with any of its heads; parameter names are the reference's."""

    def __init__(self, config: OftConfig) -> None:
        super().__init__()
        hidden, horizon, action_dim = config.language.hidden, config.action.horizon, config.action.dim
        self.config = config
        self.vision_backbone = VisionBackbone(config)
        self.projector = VisionProjector(config.vision_dim, hidden)
        self.language_model = BidirectionalLlama(config.language, with_logits=config.head == "discrete")
        self.proprio_projector = ProprioProjector(config.proprio_dim, hidden) if config.proprio_dim else None
        self.action_head: nn.Module
        if config.head == "l1":
            self.action_head = L1ActionHead(hidden, horizon, action_dim)
        elif config.head == "diffusion":
            self.action_head = DiffusionActionHead(hidden, horizon, action_dim)
            self.noisy_action_projector = NoisyActionProjector(hidden)
        else:
            self.action_head = DiscreteActions(config.language.vocab, horizon, action_dim)

    def language_mean(self, input_ids: Tensor, lengths: Sequence[int] | None = None) -> Tensor:
        """The mean embedding of prompt and </s>, [B, hidden]: what FiLM is driven by."""
        text, eos = self._embed(input_ids)
        return torch.stack(
            [
                torch.cat([words[:length], eos]).mean(dim=0)
                for words, length in zip(text, self._lengths(input_ids, lengths), strict=True)
            ]
        )

    def prefix(
        self,
        input_ids: Tensor,
        pixel_values: Tensor,
        proprio: Tensor | None = None,
        lengths: Sequence[int] | None = None,
    ) -> Tensor:
        """Rows between BOS and the prompt, [B, P, hidden]: patches of every image, proprioception."""
        language = self.language_mean(input_ids, lengths) if self.config.film else None
        rows = self.projector(self.vision_backbone(pixel_values, language))
        if self.proprio_projector is not None:
            if proprio is None:
                raise UserError(
                    f"proprioception is missing; this model needs {self.config.proprio_dim} values"
                )
            rows = torch.cat([rows, self.proprio_projector(proprio)[:, None]], dim=1)
        return rows

    def assemble(
        self,
        input_ids: Tensor,
        prefix: Tensor,
        lengths: Sequence[int] | None = None,
        placeholders: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Lay out the sequence.

        input_ids: int64 [B, L]. prefix: [B, P, hidden]. lengths: ids in use per sample where prompts differ;
        the sequences are then padded on the right. placeholders: [B, horizon x action_dim, hidden], zeros if
        None.
        Returns embeddings [B, S, hidden] and the valid rows, bool [B, S], None where all are.
        """
        text, eos = self._embed(input_ids)
        if placeholders is None:
            placeholders = text.new_zeros(len(text), self.config.placeholders, text.shape[-1])
        if lengths is None:
            tail = eos.expand(len(text), 1, -1)
            return torch.cat([text[:, :1], prefix, text[:, 1:], placeholders, tail], dim=1), None
        rows = [
            torch.cat([words[:1], images, words[1:length], actions, eos])
            for words, images, actions, length in zip(text, prefix, placeholders, lengths, strict=True)
        ]
        embeds = pad_sequence(rows, batch_first=True)
        counts = torch.tensor([len(row) for row in rows], device=embeds.device)
        return embeds, torch.arange(embeds.shape[1], device=embeds.device)[None] < counts[:, None]

    def action_rows(
        self, hidden_states: Tensor, input_ids: Tensor, lengths: Sequence[int] | None = None
    ) -> Tensor:
        """The rows the head reads, [B, placeholders, hidden]: the last id's, then all but one placeholder's.

        Shifted by one against the placeholders, deliberately: training reads the same rows.
        """
        count, before = self.config.placeholders, self.config.prefix_rows - 1
        if lengths is None:
            start = before + input_ids.shape[1]
            return hidden_states[:, start : start + count]
        starts = [before + length for length in lengths]
        return torch.stack(
            [row[start : start + count] for row, start in zip(hidden_states, starts, strict=True)]
        )

    def forward(
        self,
        input_ids: Tensor,
        pixel_values: Tensor,
        proprio: Tensor | None = None,
        lengths: Sequence[int] | None = None,
        noise: Tensor | None = None,
    ) -> OftOutput:
        """One query for each sample.

        input_ids: int64 [B, L]. pixel_values: [B, 6 n, H, W]. proprio: normalised, [B, proprio_dim].
        noise: [B, horizon, action_dim], where a diffusion head starts.
        """
        prefix = self.prefix(input_ids, pixel_values, proprio, lengths)
        if self.config.head == "diffusion":
            if noise is None:
                raise UserError("the diffusion head needs noise to start from; give [B, horizon, action_dim]")
            return self._denoise(input_ids, prefix, lengths, noise)
        embeds, valid = self.assemble(input_ids, prefix, lengths)
        hidden_states = self.language_model(embeds, valid)
        rows = self.action_rows(hidden_states, input_ids, lengths)
        if self.language_model.lm_head is not None:
            rows = self.language_model.lm_head(rows)
        return OftOutput(hidden_states, pool(hidden_states, valid), self.action_head(rows))

    def _denoise(
        self, input_ids: Tensor, prefix: Tensor, lengths: Sequence[int] | None, noise: Tensor
    ) -> OftOutput:
        steps, actions = self.config.diffusion_steps, noise
        shares = signal_shares()
        for timestep in timesteps(steps):
            row = step_embedding(timestep, prefix.shape[-1]).to(prefix)
            embeds, valid = self.assemble(
                input_ids,
                torch.cat([prefix, row.expand(len(prefix), 1, -1)], dim=1),
                lengths,
                self.noisy_action_projector(actions),
            )
            hidden_states = self.language_model(embeds, valid)
            predicted = self.action_head(self.action_rows(hidden_states, input_ids, lengths))
            actions = ddim_step(predicted, timestep, actions, steps, shares)
        return OftOutput(hidden_states, pool(hidden_states, valid), actions)

    def _embed(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        eos = input_ids.new_full((1,), EOS_ID)
        return self.language_model.embed(input_ids), self.language_model.embed(eos)

    @staticmethod
    def _lengths(input_ids: Tensor, lengths: Sequence[int] | None) -> Sequence[int]:
        return [input_ids.shape[1]] * len(input_ids) if lengths is None else lengths


def pool(hidden_states: Tensor, valid: Tensor | None) -> Tensor:
    """[B, S, hidden] -> fp32 [B, hidden]: the mean over the sequence, padding excluded."""
    if valid is None:
        return hidden_states.mean(dim=1, dtype=torch.float32)
    weights = valid[..., None].float()
    return (hidden_states.float() * weights).sum(1) / weights.sum(1)


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
    return name == "language_model.lm_head.weight" and config.head != "discrete"


def load_weights(
    config: OftConfig,
    tensors: Mapping[str, Tensor],
    *,
    source: str,
    device: torch.device,
    dtype: torch.dtype,
    seen: Callable[[str, Tensor], None] = lambda name, tensor: None,
) -> OftModel:
    """Build the network from exactly these tensors, frozen, in `dtype`; the rotary frequencies stay fp32.

    Tensors are taken one at a time, by name in order, so that a mapping which reads them from disk needs the
    model's memory once. seen: told each name and tensor as stored.
    Raises `UserError` naming `source` for a missing or unknown key, a wrong shape, or NaN or infinity.
    """
    model = build_on_meta(config)
    wanted = dict(model.named_parameters())
    check_keys(config, wanted.keys(), tensors.keys(), source)
    state = {}
    for name in sorted(wanted):
        tensor, expected = tensors[name], wanted[name].shape
        if tensor.shape != expected:
            raise UserError(
                f"{source}: tensor '{name}' has shape {list(tensor.shape)}; expected {list(expected)}"
            )
        seen(name, tensor)
        # A copy, for a tensor of a mapped file would follow, or fault with, what happens to the file.
        moved = tensor.to(device=device, dtype=dtype, copy=True)
        if not tensor.is_floating_point() or not bool(torch.isfinite(moved).all()):
            raise UserError(
                f"{source}: tensor '{name}' holds values that are not finite floats; get it again"
            )
        state[name] = moved
    model.load_state_dict(state, strict=True, assign=True)
    model.language_model.rebuild_rotary()
    return model.to(device).requires_grad_(False).eval()


def check_keys(config: OftConfig, wanted: Collection[str], found: Collection[str], source: str) -> None:
    """Raises `UserError` unless `found` has every wanted name, and besides those only ones known to be unused."""
    missing = sorted(set(wanted) - set(found))
    if missing:
        raise UserError(
            f"{source} lacks {len(missing)} of {len(wanted)} tensors, first '{missing[0]}'; "
            "use a complete checkpoint"
        )
    unknown = sorted(name for name in set(found) - set(wanted) if not unused_key(name, config))
    if unknown:
        raise UserError(
            f"{source} has {len(unknown)} tensors this model does not know, first '{unknown[0]}'; "
            "use a checkpoint of this architecture"
        )
