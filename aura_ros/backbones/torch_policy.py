"""Any torch policy as a backbone: its chunk is its output, its hidden state what one of its modules gave on the way."""

from __future__ import annotations

import difflib
import hashlib
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from aura_ros.backbones.weights import add_tensor, find_device
from aura_ros.errors import UserError
from aura_ros.types import ActionSpec, BackboneInfo, BackboneOutput, FloatArray, Observation

CALLS = ("only", "first", "last")
GREY = 127


def mean_over_sequence(output: Any) -> Tensor:
    """[D] of what a module gave: a tensor [D], [1, D] or [1, T, D] (the mean over T), or one that holds such a tensor.

    A tuple's or list's first element is taken, a mapping's or transformers output's `last_hidden_state`. Raises
    UserError for anything else, sequence-first [T, 1, D] with T > 1 among it: it is taken for a batch.
    """
    if isinstance(output, Mapping):
        output = output.get("last_hidden_state")
    elif isinstance(output, (tuple, list)) and output:
        output = output[0]
    if not isinstance(output, Tensor):
        raise UserError(
            f"the hooked module gives {type(output).__name__}, no tensor; give a pool that makes one"
        )
    if output.ndim not in (1, 2, 3) or (output.ndim > 1 and output.shape[0] != 1):
        raise UserError(
            f"the hooked module gives {list(output.shape)}; expected [D], [1, D] or [1, T, D], or give a pool that "
            "makes [D] of it"
        )
    return output.float().reshape(-1, output.shape[-1]).mean(0)


def call_with_inputs(module: nn.Module, inputs: Any) -> Any:
    """The default `call`: a mapping becomes keyword arguments, anything else the only argument."""
    return module(**inputs) if isinstance(inputs, Mapping) else module(inputs)


class TorchPolicy:
    """A frozen torch policy; implements `Backbone`. See docs/other_backbones.md."""

    def __init__(
        self,
        module: nn.Module,
        *,
        name: str,
        action: ActionSpec,
        cameras: tuple[str, ...],
        proprio_dim: int,
        hidden_module: str,
        prepare: Callable[[Observation], Any],
        read_chunk: Callable[[Any], Tensor | FloatArray],
        call: Callable[[nn.Module, Any], Any] = call_with_inputs,
        pool: Callable[[Any], Tensor] = mean_over_sequence,
        calls: str = "only",
        checkpoint: str = "",
        trained: bool = True,
        device: str = "cpu",
        seed: int = 0,
        binary_columns: tuple[int, ...] = (),
        image_rotation: str = "none",
        details: str = "",
        identity: str = "",
        test_image_size: tuple[int, int] = (256, 256),
    ) -> None:
        """Take over a loaded policy, freeze it, and run it once on test images, which gives the hidden state's width.

        hidden_module: name of the module to hook, as in `module.named_modules()`; "": the policy itself.
        prepare: observation -> inputs, on `device`. call: (module, inputs) -> output, one query.
        read_chunk: output -> float [horizon, dim], un-normalised controller units, gripper 0 closed .. 1 open.
        pool: what the hooked module gave -> [D]. calls: which call of it in a query counts, one of `CALLS`; "only"
          refuses a second one (a denoiser is called once a step).
        seed: of torch's random numbers, set before each query, so that the same observation gives the same bytes.
        identity: what else the answers depend on and no tensor holds (statistics, a version); part of the hash.
        binary_columns: of the chunk, made 0 or 1 here. test_image_size: height, width. The rest goes into `info`.
        Raises UserError for a name that is not there, a device, and a policy that does not give what it should.
        """
        if calls not in CALLS:
            raise UserError(f"calls '{calls}' is not known; choose one of: {', '.join(CALLS)}")
        hooked = find_module(module, hidden_module)
        self._device = find_device(device)
        self._name, self._hidden_module, self._calls, self._seed = name, hidden_module, calls, seed
        self._action, self._cameras, self._proprio_dim = action, cameras, proprio_dim
        self._prepare, self._call, self._read_chunk, self._pool = prepare, call, read_chunk, pool
        self._test_image_size, self._binary = test_image_size, list(binary_columns)
        self._module: nn.Module | None = module.to(self._device).eval().requires_grad_(False)
        self._hidden: list[Tensor] | None = None  # a list only during a query
        self._width: int | None = None
        self._hook = hooked.register_forward_hook(self._on_output)
        try:
            self._width = len(self.infer(self._test_observation("warm up")).hidden_state)
            digest = hashlib.sha256(json.dumps([hidden_module, calls, identity]).encode())
            for key, tensor in sorted(module.state_dict().items()):
                if isinstance(tensor, Tensor):
                    add_tensor(digest, key, tensor)
        except Exception:
            self.close()
            raise
        self._info = BackboneInfo(
            name=name,
            hidden_dim=self._width,
            proprio_dim=proprio_dim,
            cameras=cameras,
            action=action,
            checkpoint=checkpoint or name,
            checkpoint_hash=digest.hexdigest(),
            parameters=sum(parameter.numel() for parameter in module.parameters()),
            trained=trained,
            image_rotation=image_rotation,
            details=", ".join(filter(None, [details, f"hidden state of '{hidden_module}' ({calls} call)"])),
            binary_columns=binary_columns,
        )

    @property
    def info(self) -> BackboneInfo:
        """Sizes, action columns and identity: sha256 of hooked name, `identity`, parameters, persistent buffers."""
        return self._info

    @torch.inference_mode()
    def infer(self, observation: Observation) -> BackboneOutput:
        """One query.

        Raises UserError for a missing camera, another proprioception size, a chunk of another shape, and a hooked
        module that is not called as often or gives another width than it should.
        """
        if self._module is None:
            raise UserError(f"backbone '{self._name}' is closed; load it again")
        self._check(observation)
        begin = time.perf_counter()
        inputs = self._prepare(observation)
        prepared = time.perf_counter()
        output, hidden = self._query(self._module, inputs)
        chunk = self._chunk(output)
        end = time.perf_counter()
        return BackboneOutput(
            hidden_state=hidden,
            base_chunk=chunk,
            timing_ms={
                "preprocess": 1e3 * (prepared - begin),
                "forward": 1e3 * (end - prepared),
                "backbone": 1e3 * (end - begin),
            },
        )

    def warm_up(self, instruction: str | None = None) -> None:
        """One query on test images."""
        self.infer(self._test_observation(instruction or "warm up"))

    def close(self) -> None:
        """Take the hook out and let the policy go; a second call does nothing."""
        self._hook.remove()
        self._module = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _query(self, module: nn.Module, inputs: Any) -> tuple[Any, FloatArray]:
        """The policy's output and the hidden state, float32 [D]."""
        devices = [self._device] if self._device.type == "cuda" else []
        self._hidden = []
        try:
            # A denoiser draws noise; the numbers of whoever else uses torch are left as they are.
            with torch.random.fork_rng(devices):
                torch.manual_seed(self._seed)
                output = self._call(module, inputs)
            seen = self._hidden
        finally:
            self._hidden = None
        where = f"module '{self._hidden_module}' of backbone '{self._name}'"
        if not seen:
            raise UserError(f"{where} is not called in a query; hook one that is")
        if self._calls == "only" and len(seen) > 1:
            raise UserError(
                f"{where} is called {len(seen)} times in a query; say which counts: calls='first' or 'last'"
            )
        hidden = seen[0] if self._calls == "first" else seen[-1]
        if hidden.ndim != 1 or hidden.numel() == 0 or self._width not in (None, hidden.numel()):
            raise UserError(
                f"the hidden state of {where} has shape {list(hidden.shape)}; expected [{self._width or 'D'}], the "
                "same for every observation"
            )
        return output, hidden.float().cpu().numpy()

    def _on_output(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        # Pooled here, because a module may write over its output later. Not while its owner calls it.
        if self._hidden is not None:
            first = self._calls == "first" and self._hidden
            self._hidden.append(self._hidden[0] if first else self._pool(output).detach().clone())

    def _chunk(self, output: Any) -> FloatArray:
        chunk = self._read_chunk(output)
        if isinstance(chunk, Tensor):
            chunk = chunk.detach().float().cpu().numpy()
        chunk = np.array(chunk, np.float32)
        wanted = (self._action.horizon, self._action.dim)
        if chunk.shape != wanted:
            raise UserError(
                f"backbone '{self._name}' gives a chunk {list(chunk.shape)}; expected [horizon {wanted[0]}, {wanted[1]} "
                "names]: mend read_chunk or the action spec"
            )
        chunk[:, self._binary] = chunk[:, self._binary] > 0.5
        return chunk

    def _check(self, observation: Observation) -> None:
        missing = [camera for camera in self._cameras if camera not in observation.images]
        if missing:
            raise UserError(
                f"camera '{missing[0]}' is missing; this backbone needs {list(self._cameras)}, the observation has "
                f"{sorted(observation.images)}"
            )
        if self._proprio_dim and observation.proprio.shape != (self._proprio_dim,):
            raise UserError(
                f"proprioception has {observation.proprio.size} values; this backbone needs {self._proprio_dim}"
            )

    def _test_observation(self, instruction: str) -> Observation:
        image = np.full((*self._test_image_size, 3), GREY, np.uint8)
        images = dict.fromkeys(self._cameras, image)
        return Observation(images, np.zeros(self._proprio_dim, np.float32), instruction)


def find_module(module: nn.Module, name: str) -> nn.Module:
    """The module of that name. Raises UserError listing names that are like it."""
    modules = dict(module.named_modules())
    if name in modules:
        return modules[name]
    # "norm" is meant by "model.text_model.norm", "model.nrom" by "model.norm".
    tail = name.rpartition(".")[2]
    ends = [known for known in modules if known.rpartition(".")[2] == tail]
    near = list(dict.fromkeys([*difflib.get_close_matches(name, modules, 5), *ends]))[:8]
    listed = ", ".join(f"'{known}'" for known in near or [n for n in modules if n.count(".") == 0 and n])
    raise UserError(
        f"the policy has no module '{name}'; {'near it' if near else 'its own'}: {listed or 'none'}; see "
        "module.named_modules()"
    )
