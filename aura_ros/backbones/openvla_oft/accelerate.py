"""Where the network runs, and ways to run the same network faster: compiled by torch, or replayed from CUDA graphs.

Only the three parts that hold the work are wrapped: both vision towers, their projector and the trunk. All heads
keep the code of `model`, whose weights are shared. Results equal the plain network's up to rounding.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from aura_ros.backbones.openvla_oft.model import OftModel
from aura_ros.backbones.registry import ACCELERATIONS
from aura_ros.errors import UserError

PARTS = ("vision_backbone", "projector", "language_model")
# One graph for each length of prompt; a robot has few instructions, and each graph holds its activations.
GRAPHS = 4
# cuBLAS and the attention kernels set themselves up in the first calls, which a graph must not record.
CALLS_BEFORE_CAPTURE = 3


def check_accelerate(accelerate: str, device: torch.device) -> None:
    """Raises `UserError` for an unknown name, or for CUDA graphs on another device."""
    if accelerate not in ACCELERATIONS:
        raise UserError(f"accelerate '{accelerate}' is unknown; choose one of: {', '.join(ACCELERATIONS)}")
    if accelerate == "cuda-graph" and device.type != "cuda":
        raise UserError(
            f"accelerate 'cuda-graph' needs a CUDA device, not '{device}'; use 'compile' or 'none'"
        )


def accelerated(model: OftModel, accelerate: str) -> OftModel:
    """The network to call for queries; `model` itself stays as it is.

    accelerate: "none" gives `model`. "compile" compiles the parts at the first query, once more at the first
    prompt of another length, and then for all lengths: each takes seconds to minutes. "cuda-graph" records the
    parts' kernels at the first query of each length of prompt, the newest `GRAPHS` kept.
    """
    if accelerate == "none":
        return model
    twin = copy.copy(model)
    # Else the assignments below would reach the original.
    twin._modules = dict(model._modules)
    for name in PARTS:
        part = getattr(model, name)
        setattr(twin, name, Compiled(part) if accelerate == "compile" else Graphed(part))
    return twin


class Stand(nn.Module):
    """Called in place of a module, which answers for everything else."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


class Compiled(Stand):
    """A module through torch.compile, which works at the first call and at the first of another shape."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self._run = torch.compile(inner)

    def forward(self, *tensors: Tensor | None) -> Tensor:
        """What the module returns, up to rounding. Raises `UserError` if nothing here can compile."""
        try:
            return self._run(*tensors)
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(
                f"torch.compile failed ({reason}); use accelerate 'none', or install a C++ compiler and, for "
                "CUDA, Triton"
            ) from error


class Graphed(Stand):
    """A module through CUDA graphs, one for each combination of input shapes; an output is a fresh tensor.

    Not yet run on a GPU: the tests replace the recording where there is none.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self._graphs: OrderedDict[tuple, tuple[torch.cuda.CUDAGraph, list[Tensor | None], Tensor]] = (
            OrderedDict()
        )
        # Graphs run one after another, so that they can share the memory of their activations.
        self._pool: Any = None

    def forward(self, *tensors: Tensor | None) -> Tensor:
        """What the module returns; a new combination of shapes is recorded first."""
        key = tuple(None if tensor is None else (tensor.shape, tensor.dtype) for tensor in tensors)
        if key not in self._graphs:
            self._graphs[key] = self._record(tensors)
            if len(self._graphs) > GRAPHS:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        graph, inputs, output = self._graphs[key]
        for fixed, tensor in zip(inputs, tensors, strict=True):
            if fixed is not None and tensor is not None:
                fixed.copy_(tensor)
        graph.replay()
        # The next replay overwrites it, and the caller may keep it.
        return output.clone()

    def _record(
        self, tensors: tuple[Tensor | None, ...]
    ) -> tuple[torch.cuda.CUDAGraph, list[Tensor | None], Tensor]:
        inputs = [None if tensor is None else tensor.clone() for tensor in tensors]
        device = next(self.inner.parameters()).device
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.device(device):
            # A graph cannot be recorded on the default stream, and its first calls belong on the same kind.
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(CALLS_BEFORE_CAPTURE):
                    self.inner(*inputs)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                output = self.inner(*inputs)
        return graph, inputs, output
