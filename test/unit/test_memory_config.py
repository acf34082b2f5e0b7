"""Sizes, counts and refusals of a memory's configuration."""

import dataclasses
import math
import subprocess
import sys

import pytest

from aura_ros.errors import UserError
from aura_ros.memory import MemoryConfig, Variant
from aura_ros.memory.config import parameter_shapes

# Paper table 6: total parameters of the main task (observation 14, 4 classes) with the unused predictor.
TABLE = {
    ("aura", 16): 20_935,
    ("aura", 32): 30_279,
    ("aura", 64): 55_111,
    ("fixed_size_state", 16): 20_935,
    ("fixed_size_state", 32): 30_279,
    ("fixed_size_state", 64): 55_111,
    ("write_every_step", 16): 20_935,
    ("write_every_step", 32): 30_279,
    ("write_every_step", 64): 55_111,
    ("random_write", 16): 20_935,
    ("random_write", 32): 30_279,
    ("random_write", 64): 55_111,
    ("periodic_write", 16): 20_935,
    ("periodic_write", 32): 30_279,
    ("periodic_write", 64): 55_111,
    ("full_recurrence", 16): 26_061,
    ("full_recurrence", 32): 30_125,
    ("full_recurrence", 64): 44_397,
    ("learned_token_gate", 16): 22_100,
    ("learned_token_gate", 32): 31_444,
    ("learned_token_gate", 64): 56_276,
    ("no_memory", 16): 7_316,
    ("no_memory", 32): 11_556,
    ("no_memory", 64): 26_180,
}


def test_the_table_covers_every_variant_at_three_sizes():
    assert set(TABLE) == {(v.value, n) for v in Variant for n in (16, 32, 64)}


@pytest.mark.parametrize(("variant", "n"), TABLE)
def test_parameter_counts_are_those_of_table_6(variant, n):
    from aura_ros.memory import MemoryModule

    config = MemoryConfig(variant=variant, input_dim=14, out_dim=4, dk=n, dv=n, predictor=True)
    module = MemoryModule(config)
    assert sum(p.numel() for p in module.parameters()) == TABLE[variant, n]
    assert {k: tuple(p.shape) for k, p in module.named_parameters()} == parameter_shapes(config)


def test_gate_and_predictor_counts_at_n_32():
    shapes = parameter_shapes(MemoryConfig(input_dim=14, out_dim=4, predictor=True))
    count = {
        part: sum(math.prod(shape) for name, shape in shapes.items() if name.startswith(part))
        for part in ("gate.", "predictor.")
    }
    assert count == {"gate.": 6_337, "predictor.": 8_320}


def test_predictor_is_off_by_default():
    assert not any(n.startswith("predictor") for n in parameter_shapes(MemoryConfig(input_dim=14, out_dim=4)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("variant", "lstm"),
        ("variant", 3),
        ("input_kind", "conv"),
        ("gate_estimator", "reinforce"),
        ("input_dim", 0),
        ("input_dim", 14.0),
        ("input_dim", True),
        ("out_dim", -1),
        ("dk", 0),
        ("dv", 10**6),
        ("d_model", 0),
        ("hidden", 0),
        ("gru_hidden", 0),
        ("token_classes", 0),
        ("predictor", 1),
        ("normalise_keys", "yes"),
        ("residual", None),
        ("temperature", 0.0),
        ("temperature", float("nan")),
        ("threshold", 1.5),
        ("threshold", "0.5"),
        ("gate_noise", -1.0),
        ("gate_bias_init", float("inf")),
        ("eta_init", 0.0),
        ("alpha_init", 1.0),
        ("write_rate", 0.0),
        ("write_rate", 1.1),
        ("memory_step_period", 0),
        ("seed", -1),
    ],
)
def test_a_wrong_field_is_refused_in_one_line_that_names_it(field, value):
    with pytest.raises(UserError) as refusal:
        MemoryConfig(**({"input_dim": 14, "out_dim": 4} | {field: value}))
    message = str(refusal.value)
    assert field in message
    assert repr(value) in message
    assert "allowed" in message
    assert "\n" not in message


def test_every_field_is_validated():
    # A field added later without a check would take an object() as it is.
    for field in dataclasses.fields(MemoryConfig):
        with pytest.raises(UserError, match=field.name):
            MemoryConfig(**({"input_dim": 14, "out_dim": 4} | {field.name: object()}))


def test_json_round_trip_keeps_every_field():
    config = MemoryConfig(
        input_dim=4096,
        out_dim=56,
        variant="random_write",
        input_kind="projection",
        dk=16,
        seed=7,
        write_rate=0.3,
    )
    assert MemoryConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"input_dim": 1, "out_dim": 1, "dkk": 3}', '{"input_dim": 1}', "[" * 100_000]
)
def test_malformed_json_is_a_user_error_of_one_line(text):
    with pytest.raises(UserError) as refusal:
        MemoryConfig.from_json(text)
    assert "\n" not in str(refusal.value)


def test_periodic_interval_matches_the_papers_measured_rate():
    # Paper: periodic write at rho 0.15 made 2.92 writes/s of 20, which is 14 of 96 steps.
    interval = MemoryConfig(input_dim=14, out_dim=4, variant="periodic_write").write_interval
    assert sum(t % interval == 0 for t in range(96)) == 14


def test_importing_the_package_imports_neither_torch_nor_rclpy():
    code = "import sys, aura_ros.memory; print(sorted({'torch', 'rclpy', 'mujoco'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_unknown_name_of_the_package_is_an_attribute_error():
    import aura_ros.memory

    with pytest.raises(AttributeError, match="nonsense"):
        _ = aura_ros.memory.nonsense
