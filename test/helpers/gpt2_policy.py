"""A policy of another package's kind: a tiny GPT-2 with random weights and a linear head, behind the generic backbone."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2Model

from aura_ros.backbones.torch_policy import TorchPolicy
from aura_ros.types import LIBERO_ACTION_SPEC, Observation

CAMERAS = ("agentview", "wrist")
HIDDEN, HORIZON, DIM, PROPRIO = 32, 8, 7, 8


class Gpt2Policy(nn.Module):
    """Tokens are two pictures, the instruction's bytes and the proprioception; the chunk is a head on their mean."""

    def __init__(self) -> None:
        super().__init__()
        config = GPT2Config(vocab_size=256, n_positions=64, n_embd=HIDDEN, n_layer=2, n_head=2)
        self.gpt2 = GPT2Model(config)
        self.picture, self.proprio = nn.Linear(8 * 8 * 3, HIDDEN), nn.Linear(PROPRIO, HIDDEN)
        self.head = nn.Linear(HIDDEN, HORIZON * DIM)
        self.norm = nn.BatchNorm1d(DIM)  # has a buffer that a query must not change

    def forward(self, ids: Tensor, pictures: Tensor, proprio: Tensor) -> dict[str, Tensor]:
        """ids: [1, L]. pictures: [1, 2, 192]. proprio: [1, 8]. The chunk: [1, 8, 7]."""
        words = self.gpt2.wte(ids)
        tokens = torch.cat([self.picture(pictures), words, self.proprio(proprio)[:, None]], 1)
        hidden = self.gpt2(inputs_embeds=tokens).last_hidden_state
        chunk = torch.tanh(self.head(hidden.mean(1))).reshape(-1, HORIZON, DIM)
        return {"chunk": self.norm(chunk.flatten(0, 1)).reshape(chunk.shape)}


def network(seed: int = 0) -> Gpt2Policy:
    """Random weights from a seed, float32, on the CPU."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return Gpt2Policy()


def prepare(observation: Observation) -> dict[str, Tensor]:
    """What `forward` takes: pictures as 8 x 8 means, bytes as ids."""
    small = [
        torch.nn.functional.adaptive_avg_pool2d(
            torch.from_numpy(observation.images[c]).permute(2, 0, 1) / 255.0, 8
        )
        for c in CAMERAS
    ]
    return {
        "ids": torch.from_numpy(np.frombuffer(observation.instruction.encode(), np.uint8).astype(np.int64))[
            None
        ],
        "pictures": torch.stack(small).reshape(1, len(CAMERAS), -1),
        "proprio": torch.from_numpy(observation.proprio)[None],
    }


def backbone(module: nn.Module | None = None, **changes) -> TorchPolicy:
    """The whole backbone; keywords as for TorchPolicy."""
    options = {
        "name": "gpt2_policy",
        "action": LIBERO_ACTION_SPEC,
        "cameras": CAMERAS,
        "proprio_dim": PROPRIO,
        "hidden_module": "gpt2.ln_f",
        "prepare": prepare,
        "read_chunk": lambda output: output["chunk"][0],
        "trained": False,
    }
    return TorchPolicy(network() if module is None else module, **{**options, **changes})


def make(checkpoint, *, device, dtype, unnorm_key, seed) -> TorchPolicy:
    """What an entry point names."""
    return backbone(network(seed), device=device, checkpoint=checkpoint or f"random:seed={seed}")


def make_no_backbone(checkpoint, **_options) -> dict[str, object]:
    """What an entry point must not name."""
    return {"checkpoint": checkpoint}
