"""The two vision towers: DINOv2 (class and register tokens, LayerScale) and SigLIP (neither).

Parameter names are timm's, as the reference checkpoints store them. Built without timm, and without the
parts whose output is never used: the last block, the final norm and SigLIP's attention pool.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional

from aura_ros.backbones.openvla_oft.attention import attend
from aura_ros.backbones.openvla_oft.config import OftConfig, TowerConfig

NORM_EPS = 1e-6


class Attention(nn.Module):
    """Multi-head self-attention with one matrix for q, k and v."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, width] -> [B, N, width]."""
        batch, rows, width = x.shape
        qkv = self.qkv(x).reshape(batch, rows, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        mixed = attend(q, k, v)
        return self.proj(mixed.transpose(1, 2).reshape(batch, rows, width))


class Mlp(nn.Module):
    """Linear, erf GELU, Linear."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, inner)
        self.fc2 = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width]."""
        return self.fc2(functional.gelu(self.fc1(x)))


class LayerScale(nn.Module):
    """One factor a channel; the reference renamed `gamma`, which transformers rewrites on loading."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale_factor = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width]."""
        return x * self.scale_factor


class Block(nn.Module):
    """Pre-norm transformer block: x + attention, x + MLP.

    film_dim: width of the mean language embedding that scales and shifts the channels in between; 0: none.
    """

    def __init__(self, config: TowerConfig, film_dim: int = 0) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width, eps=NORM_EPS)
        self.attn = Attention(config.width, config.heads)
        self.ls1 = LayerScale(config.width) if config.layer_scale else nn.Identity()
        self.norm2 = nn.LayerNorm(config.width, eps=NORM_EPS)
        self.mlp = Mlp(config.width, config.mlp_width)
        self.ls2 = LayerScale(config.width) if config.layer_scale else nn.Identity()
        if film_dim:
            self.scale = nn.Linear(film_dim, config.width)
            self.shift = nn.Linear(film_dim, config.width)

    def forward(self, x: Tensor, language: Tensor | None = None) -> Tensor:
        """[B, N, width], language [B, film_dim] -> [B, N, width]."""
        x = x + self.ls1(self.attn(self.norm1(x)))
        if language is not None:
            x = x * (1 + self.scale(language)[:, None]) + self.shift(language)[:, None]
        return x + self.ls2(self.mlp(self.norm2(x)))


class PatchEmbed(nn.Module):
    """One linear map of every patch, as a strided convolution."""

    def __init__(self, width: int, patch: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, width, kernel_size=patch, stride=patch)

    def forward(self, x: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, patches, width], row-major over the image."""
        return self.proj(x).flatten(2).transpose(1, 2)


class ConvStem(nn.Module):
    """Convolutions of stride 2 down to a patch, then one map: overlapping patches, no timm name."""

    def __init__(self, width: int, patch: int) -> None:
        super().__init__()
        halvings = patch.bit_length() - 1
        widths = [3, *(width >> max(halvings - 1 - i, 0) for i in range(halvings))]
        self.convs = nn.ModuleList(
            nn.Conv2d(a, b, kernel_size=3, stride=2, padding=1) for a, b in itertools.pairwise(widths)
        )
        self.proj = nn.Conv2d(width, width, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, patches, width], row-major over the image."""
        for conv in self.convs:
            x = functional.gelu(conv(x))
        return self.proj(x).flatten(2).transpose(1, 2)


class Tower(nn.Module):
    """A vision transformer up to block depth - 2, without the final norm."""

    def __init__(self, config: TowerConfig, patches: int, patch: int, film_dim: int = 0) -> None:
        super().__init__()
        self.patch_embed = (ConvStem if config.stem == "conv" else PatchEmbed)(config.width, patch)
        self.pos_embed = nn.Parameter(torch.zeros(1, patches, config.width))
        self.cls_token = nn.Parameter(torch.zeros(1, 1, config.width)) if config.class_token else None
        self.reg_token = (
            nn.Parameter(torch.zeros(1, config.registers, config.width)) if config.registers else None
        )
        self.blocks = nn.ModuleList(Block(config, film_dim) for _ in range(config.depth - 1))

    def forward(self, images: Tensor, language: Tensor | None = None) -> Tensor:
        """[B, 3, H, W], language [B, film_dim] -> [B, patches, width], prefix tokens dropped."""
        # Positions are added to the patches only: DINOv2's register variant has none for its prefix tokens.
        x = self.patch_embed(images) + self.pos_embed
        prefix = [
            token.expand(len(x), -1, -1) for token in (self.cls_token, self.reg_token) if token is not None
        ]
        dropped = sum(token.shape[1] for token in prefix)
        x = torch.cat([*prefix, x], dim=1)
        for block in self.blocks:
            x = block(x, language)
        return x[:, dropped:]


class VisionBackbone(nn.Module):
    """Both towers side by side, one pass over the images of all cameras."""

    def __init__(self, config: OftConfig) -> None:
        super().__init__()
        film_dim = config.language.hidden if config.film else 0
        patches, patch = config.patches_per_image, config.patch
        self.featurizer = Tower(config.dino, patches, patch, film_dim)
        self.fused_featurizer = Tower(config.siglip, patches, patch, film_dim)

    def forward(self, pixel_values: Tensor, language: Tensor | None = None) -> Tensor:
        """[B, 6 n, H, W] -> [B, n x patches, both widths]; per image DINO's three channels, then SigLIP's.

        language: [B, hidden], the mean embedding of prompt and </s>; for checkpoints with FiLM only.
        """
        batch, channels, height, width = pixel_values.shape
        dino, siglip = pixel_values.reshape(-1, 6, height, width).split(3, dim=1)
        if language is not None:
            language = language.repeat_interleave(channels // 6, dim=0)
        features = torch.cat(
            [self.featurizer(dino, language), self.fused_featurizer(siglip, language)], dim=2
        )
        return features.reshape(batch, -1, features.shape[-1])
