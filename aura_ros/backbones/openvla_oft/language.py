"""The Llama trunk of stock transformers with attention over every token in both directions."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaModel, LlamaRotaryEmbedding

from aura_ros.backbones.openvla_oft.attention import attend
from aura_ros.backbones.openvla_oft.config import LanguageConfig
from aura_ros.errors import UserError

ATTENTION = "aura_ros_bidirectional"


def bidirectional_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention over every row; query, key, value [B, heads, S, head_dim] -> [B, S, heads, head_dim].

    A mask of one element means no padding: without a mask the flash kernels serve, with one they do not.
    Stock `sdpa` cannot be used for that, for it takes a missing mask as causal.
    """
    mask = None if attention_mask.numel() == 1 else attention_mask
    mixed = attend(query, key, value, mask=mask, scale=scaling)
    return mixed.transpose(1, 2).contiguous(), None


def llama_config(config: LanguageConfig) -> LlamaConfig:
    """Every value stated: a checkpoint's `text_config` leaves most to defaults, which differ by version."""
    # A dict, because transformers 4 and 5 declare different keywords and both take all of these.
    values: dict[str, Any] = {
        "vocab_size": config.vocab,
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.heads,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "pad_token_id": None,
        "attn_implementation": ATTENTION,
    }
    return LlamaConfig(**values)


class BidirectionalLlama(nn.Module):
    """Embeddings [B, S, hidden] -> final-norm hidden states [B, S, hidden]."""

    def __init__(self, config: LanguageConfig, with_logits: bool = False) -> None:
        super().__init__()
        AttentionInterface.register(ATTENTION, bidirectional_attention)
        self.model = LlamaModel(llama_config(config))
        # Only the discrete head reads logits; the others save a 32064 x 4096 product.
        self.lm_head = nn.Linear(config.hidden, config.vocab, bias=False) if with_logits else None

    def rebuild_rotary(self) -> None:
        """Recompute the rotary frequencies in fp32 on the CPU; a model built on the meta device has none."""
        self.model.rotary_emb = LlamaRotaryEmbedding(config=self.model.config)

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids [...] -> embeddings [..., hidden]."""
        return self.model.embed_tokens(ids)

    def attention_mask(self, rows: int, valid: Tensor | None, device: torch.device) -> Tensor:
        """What a query may look at: bool [1, 1, 1, 1], everything, or [B, 1, rows, rows], every valid row.

        A 4-D mask is taken as it is. With `attention_mask=None` stock transformers is silently causal, even
        where `is_causal` is False.
        """
        if valid is None:
            return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
        return valid[:, None, None, :].expand(len(valid), 1, rows, rows)

    def forward(self, embeds: Tensor, valid: Tensor | None = None) -> Tensor:
        """embeds [B, S, hidden]; valid: bool [B, S], false on padding (None: no padding)."""
        rows = embeds.shape[1]
        output = self.model(
            inputs_embeds=embeds,
            attention_mask=self.attention_mask(rows, valid, embeds.device),
            position_ids=torch.arange(rows, device=embeds.device)[None],
            use_cache=False,
        )
        return output.last_hidden_state

    @torch.inference_mode()
    def check_bidirectional(self, rows: int = 8) -> None:
        """Change the last of `rows` embeddings: the first hidden state must change. Else raise `UserError`.

        A causal trunk runs, and gives actions that are wrong by as much as they vary.
        """
        weight = self.model.embed_tokens.weight
        # Real embeddings, so that the scale is the one the trunk was trained on.
        ids = torch.arange(rows + 1, device=weight.device) % len(weight)
        table = self.embed(ids)
        before, after = table[None, :rows], torch.cat([table[: rows - 1], table[rows:]])[None]
        first, again, moved = (self(x)[0, 0].float() for x in (before, before, after))
        noise = (first - again).abs().max().item()
        change = (first - moved).abs().max().item()
        if not change > 10 * noise:
            raise UserError(
                f"attention is causal with transformers {transformers.__version__} (the last token does not "
                "reach the first); OpenVLA-OFT needs both directions: install transformers>=4.57.6,<6"
            )
