"""Backbones of other packages: found by entry points, and any torch policy behind the generic one."""

import ast
import gc
import hashlib
import inspect
import re
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from gpt2_policy import CAMERAS, HIDDEN, backbone, network
from torch import nn

from aura_ros.backbones import KNOWN_BACKBONES, load_backbone
from aura_ros.backbones.registry import check_checkpoint
from aura_ros.backbones.torch_policy import TorchPolicy, mean_over_sequence
from aura_ros.errors import UserError
from aura_ros.nodes.policy_config import PolicyNodeConfig
from aura_ros.policy import Policy, load_policy
from aura_ros.policy.policy import load_memory
from aura_ros.types import Observation

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "other_backbones.md"


def observation(seed=0, **changes):
    rng = np.random.default_rng(seed)
    images = {camera: rng.integers(0, 256, (64, 64, 3), dtype=np.uint8) for camera in CAMERAS}
    fields = {
        "images": images,
        "proprio": rng.standard_normal(8).astype(np.float32),
        "instruction": "lift it",
    }
    return Observation(**{**fields, **changes})


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Make a package's metadata importable: entry points by name, as after `pip install`."""

    def install(package="other_policy", **points):
        info = tmp_path / package / f"{package}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = [f"{name} = {value}" for name, value in points.items()]
        (info / "entry_points.txt").write_text("\n".join(["[aura_ros.backbones]", *lines, ""]))
        monkeypatch.syspath_prepend(str(info.parent))

    return install


# -- the generic backbone -----------------------------------------------------------------------------------


def test_hidden_state_is_the_mean_of_what_the_hooked_module_gave():
    module = network()
    policy = backbone(module)
    seen = []
    handle = module.gpt2.ln_f.register_forward_hook(lambda _m, _i, output: seen.append(output))
    output = policy.infer(observation())
    handle.remove()
    assert (output.hidden_state.dtype, output.hidden_state.shape) == (np.float32, (HIDDEN,))
    np.testing.assert_array_equal(output.hidden_state, seen[0][0].mean(0).numpy())
    assert (output.base_chunk.dtype, output.base_chunk.shape) == (np.float32, (8, 7))
    assert output.timing_ms["backbone"] > 0
    assert policy.info.hidden_dim == HIDDEN


def test_same_observation_gives_the_same_bytes_and_another_does_not():
    policy = backbone()
    first, second, other = (policy.infer(observation(seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first.hidden_state, second.hidden_state)
    np.testing.assert_array_equal(first.base_chunk, second.base_chunk)
    assert not np.array_equal(first.hidden_state, other.hidden_state)


class Noisy(nn.Module):
    """A denoiser: draws noise, and calls one module once a step."""

    def __init__(self, steps=3):
        super().__init__()
        self.inner, self.steps = nn.Linear(56, 56), steps
        self.unused = nn.Linear(2, 2)

    def forward(self, seed):
        chunk = torch.randn(1, 56)
        for _ in range(self.steps):
            chunk = torch.tanh(self.inner(chunk))
        return chunk.reshape(8, 7)


def noisy(module=None, **changes):
    options = {
        "hidden_module": "inner",
        "prepare": lambda _: 0,
        "read_chunk": lambda chunk: chunk,
        "calls": "last",
    }
    return backbone(module or Noisy(), **{**options, **changes})


def test_noise_of_a_denoiser_is_the_same_each_time_and_takes_no_random_numbers_from_others():
    policy = noisy()
    torch.manual_seed(7)
    expected = torch.randn(3)
    torch.manual_seed(7)
    first, second = (policy.infer(observation()).base_chunk for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert torch.equal(torch.randn(3), expected)
    assert not np.array_equal(first, noisy(Noisy(), seed=1).infer(observation()).base_chunk)


def test_module_called_more_than_once_must_say_which_call_counts():
    torch.manual_seed(0)
    module = Noisy()
    with pytest.raises(
        UserError, match=r"'inner' of .* is called 3 times in a query; say which counts: calls='first' or"
    ):
        noisy(module, calls="only")
    first = noisy(module, calls="first").infer(observation()).hidden_state
    last = noisy(module, calls="last").infer(observation()).hidden_state
    assert not np.array_equal(first, last)
    module.steps = 1
    np.testing.assert_array_equal(noisy(module).infer(observation()).hidden_state, first)
    with pytest.raises(UserError, match="calls 'all' is not known; choose one of: only, first, last"):
        noisy(calls="all")


def test_module_that_is_never_called_is_named():
    with pytest.raises(UserError, match="module 'unused' of backbone 'gpt2_policy' is not called in a query"):
        noisy(hidden_module="unused")


@pytest.mark.parametrize(
    ("name", "near"), [("gpt2.ln_g", "near it: .*'gpt2.ln_f'"), ("ln_f", "near it: 'gpt2.ln_f'")]
)
def test_wrong_module_name_lists_those_near_it(name, near):
    with pytest.raises(UserError, match=f"the policy has no module '{name}'; {near}"):
        backbone(hidden_module=name)


def test_wrong_module_name_like_no_other_lists_the_policys_own():
    with pytest.raises(
        UserError, match=r"no module 'zzz'; its own: 'gpt2', 'picture', 'proprio', 'head', 'norm'"
    ):
        backbone(hidden_module="zzz")


@pytest.mark.parametrize(
    "output",
    [
        torch.arange(6.0).reshape(1, 2, 3),
        (torch.arange(6.0).reshape(1, 2, 3), "cache"),
        {"last_hidden_state": torch.arange(6.0).reshape(1, 2, 3)},
        torch.tensor([1.5, 2.5, 3.5]),
        torch.tensor([[1.5, 2.5, 3.5]]).bfloat16(),
    ],
)
def test_mean_over_the_sequence_of_what_modules_give(output):
    assert torch.equal(mean_over_sequence(output), torch.tensor([1.5, 2.5, 3.5]))


def test_sequence_first_output_is_not_taken_for_a_batch():
    with pytest.raises(
        UserError, match=r"the hooked module gives \[5, 1, 3\]; expected \[D\], \[1, D\] or \[1, T, D\]"
    ):
        mean_over_sequence(torch.zeros(5, 1, 3))
    with pytest.raises(UserError, match="the hooked module gives NoneType, no tensor; give a pool"):
        mean_over_sequence({"logits": torch.zeros(1)})


def test_pool_of_ones_own_is_used():
    seen = []
    policy = backbone(pool=lambda output: seen.append(output) or output[0, -1])
    np.testing.assert_array_equal(policy.infer(observation()).hidden_state, seen[-1][0, -1].numpy())


def test_width_that_depends_on_the_observation_is_refused():
    def pool(output):
        return output[0, :, 0]  # as wide as the sequence is long

    policy = backbone(pool=lambda output: pool(output))
    with pytest.raises(
        UserError, match=r"hidden state of module 'gpt2.ln_f' .* has shape \[14\]; expected \[10\]"
    ):
        policy.infer(observation(instruction="lift it twice"[:11]))


def test_chunk_of_another_shape_is_refused_at_loading():
    with pytest.raises(
        UserError, match=r"gives a chunk \[7\]; expected \[horizon 8, 7 names\]: mend read_chunk"
    ):
        backbone(read_chunk=lambda output: output["chunk"][0, 0])


def test_gripper_columns_are_decided_at_one_half():
    chunk = backbone(binary_columns=(6,)).infer(observation()).base_chunk
    assert set(chunk[:, 6]) <= {0.0, 1.0}
    assert len(set(chunk[:, 5])) > 2 or not set(chunk[:, 5]) <= {0.0, 1.0}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"images": {}}, r"camera 'agentview' is missing; this backbone needs \['agentview', 'wrist'\]"),
        ({"proprio": np.zeros(7, np.float32)}, "proprioception has 7 values; this backbone needs 8"),
    ],
)
def test_observation_that_does_not_fit_is_refused(changes, words):
    with pytest.raises(UserError, match=words):
        backbone().infer(observation(**changes))


def test_identity_follows_weights_buffers_and_the_hooked_module():
    module = network()
    one = backbone(module).info.checkpoint_hash
    assert one == backbone(network()).info.checkpoint_hash
    assert len(one) == len(hashlib.sha256().hexdigest())
    assert one != backbone(network(1)).info.checkpoint_hash
    assert one != backbone(network(), hidden_module="gpt2.h.1").info.checkpoint_hash
    assert one != backbone(network(), identity="statistics of another robot").info.checkpoint_hash
    module.norm.running_mean[0] += 1
    assert one != backbone(module).info.checkpoint_hash


def test_policy_is_frozen_and_unchanged_by_queries():
    module = network().train()
    policy = backbone(module)
    before = policy.info.checkpoint_hash
    policy.warm_up("lift")
    policy.infer(observation())
    assert not any(parameter.requires_grad for parameter in module.parameters())
    assert backbone(module).info.checkpoint_hash == before
    assert policy.info.parameters == sum(p.numel() for p in module.parameters())


def test_close_takes_the_hook_out_and_frees_the_policy():
    module = network()
    policy = backbone(module)
    assert module.gpt2.ln_f._forward_hooks
    policy.close()
    policy.close()
    assert not module.gpt2.ln_f._forward_hooks
    gone = weakref.ref(module)
    del module
    gc.collect()
    assert gone() is None
    with pytest.raises(UserError, match="backbone 'gpt2_policy' is closed; load it again"):
        policy.infer(observation())


def test_failed_loading_leaves_no_hook_behind():
    module = network()
    with pytest.raises(UserError, match="gives a chunk"):
        backbone(module, read_chunk=lambda output: output["chunk"][0, 0])
    assert not module.gpt2.ln_f._forward_hooks


def test_policy_with_an_untrained_memory_acts_as_its_backbone():
    policy = Policy(backbone(), load_memory(backbone().info))
    step = policy.act(observation())
    np.testing.assert_allclose(
        step.chunk.data, step.base_chunk * np.float32([0.05] * 3 + [0.5] * 3 + [1]), rtol=1e-6
    )
    assert policy.memory.steps == 1
    assert step.hidden_state.shape == (HIDDEN,)


# -- entry points --------------------------------------------------------------------------------------------


def test_policy_is_loaded_by_the_name_of_an_entry_point(install):
    install(my_policy="gpt2_policy:make")
    policy = load_policy(backbone="my_policy", seed=5)
    info = policy.backbone.info
    assert isinstance(policy.backbone, TorchPolicy)
    assert (info.name, info.checkpoint) == ("gpt2_policy", "random:seed=5")
    assert policy.memory_checkpoint == ""
    assert policy.act(observation()).chunk.data.shape == (8, 7)
    policy.close()


def test_entry_point_gets_what_the_user_gave(install, tmp_path):
    install(my_policy="gpt2_policy:make")
    file = tmp_path / "weights"
    assert load_backbone("my_policy", file, seed=1).info.checkpoint == str(file)
    check_checkpoint("my_policy", file)
    with pytest.raises(UserError, match="device 'tpu' is not supported"):
        load_backbone("my_policy", device="tpu")
    with pytest.raises(
        UserError, match="accelerate 'compile' is for compact, openvla_oft; leave it 'none' for 'my_policy'"
    ):
        load_backbone("my_policy", accelerate="compile")


def test_unknown_backbone_lists_both_kinds_and_says_how_to_add_one(install):
    install(my_policy="gpt2_policy:make", other="gpt2_policy:make")
    words = (
        "backbone 'best' is unknown; choose one of: compact, openvla_oft, my_policy, other; a package adds one by an "
        "entry point of the group 'aura_ros.backbones'"
    )
    for call in (load_backbone, check_checkpoint):
        with pytest.raises(UserError, match=words):
            call("best")


def test_node_parameter_takes_names_of_entry_points_and_refuses_others(install):
    with pytest.raises(
        UserError, match="backbone 'my_policy' is not known; choose one of: compact, openvla_oft$"
    ):
        PolicyNodeConfig(backbone="my_policy")
    install(my_policy="gpt2_policy:make")
    assert PolicyNodeConfig(backbone="my_policy").backbone == "my_policy"
    with pytest.raises(
        UserError, match="backbone 'best' is not known; choose one of: compact, openvla_oft, my_policy$"
    ):
        PolicyNodeConfig(backbone="best")


def test_built_in_name_is_never_taken_by_a_package(install):
    install(compact="no_such_module:make")
    assert list(KNOWN_BACKBONES) == ["compact", "openvla_oft"]
    assert load_backbone("compact", "random").info.name == "compact"


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (
            "no_such_module:make",
            r"of other_policy \(no_such_module:make\) cannot be imported \(No module named",
        ),
        ("gpt2_policy:no_such_name", "cannot be imported .*no_such_name"),
        ("gpt2_policy:HIDDEN", r"is int; it must be make\(checkpoint, \*, device, dtype, unnorm_key, seed\)"),
        (
            "gpt2_policy:make_no_backbone",
            r"made dict without info \(a BackboneInfo\), infer, warm_up, close; it must be a Backbone",
        ),
        (
            "gpt2_policy:prepare",
            r"cannot be called as make\(checkpoint, .*\(.*unexpected keyword argument 'device'\)",
        ),
    ],
)
def test_broken_entry_point_is_named_with_its_package(install, target, words):
    install(my_policy=target)
    with pytest.raises(UserError, match=f"backbone 'my_policy' .*{words}"):
        load_backbone("my_policy")


def test_name_of_two_packages_is_refused(install):
    install("one", my_policy="gpt2_policy:make")
    install("two", my_policy="gpt2_policy:make")
    with pytest.raises(
        UserError, match=r"backbone 'my_policy' is given by 2 packages \(one, two\); exactly one must"
    ):
        load_backbone("my_policy")


# -- the guide ------------------------------------------------------------------------------------------------


def blocks():
    return re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)


def test_guides_code_names_what_there_is():
    keywords = set(inspect.signature(TorchPolicy).parameters)
    calls = [
        node
        for block in blocks()
        for node in ast.walk(ast.parse(block))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "TorchPolicy"
    ]
    assert len(calls) >= 2
    for call in calls:
        given = {keyword.arg for keyword in call.keywords}
        assert given <= keywords
        required = {n for n, p in inspect.signature(TorchPolicy).parameters.items() if p.default is p.empty}
        assert required <= given | {"module"}


def test_guides_generic_backbone_works_as_it_is_printed(install, tmp_path, monkeypatch):
    code = next(block for block in blocks() if "class Network" in block)
    (tmp_path / "my_package.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    install(my_policy="my_package:make")
    policy = load_policy(backbone="my_policy")
    assert policy.act(observation()).chunk.data.shape == (8, 7)
