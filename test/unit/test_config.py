"""Configuration fields: one description for command line, parameters and checks."""

from dataclasses import dataclass, fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aura_ros.config import check_fields, from_text, option
from aura_ros.errors import UserError
from aura_ros.nodes.policy_config import PolicyNodeConfig


@dataclass(frozen=True)
class Config:
    mode: str = option("slow", "speed", choices=("slow", "fast"))
    gate__threshold: float = option(0.5, "of the gate", minimum=0.0, maximum=1.0)
    count: int = option(1, "how many", minimum=1)
    limit: float = option(1.0, "at most", maximum=2.0)
    quaternion: tuple[float, ...] = option((0.0, 1.0), "x y", minimum=-1.0, maximum=1.0)
    on: bool = option(True, "switch")
    text: str = option("", "any text")

    def __post_init__(self) -> None:
        check_fields(self)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mode": "medium"}, "mode 'medium' is not known; choose one of: slow, fast"),
        ({"gate__threshold": 1.5}, "gate.threshold 1.5 is out of range; allowed: 0.0 to 1.0"),
        ({"gate__threshold": float("nan")}, "gate.threshold nan is out of range; allowed: 0.0 to 1.0"),
        ({"count": 0}, "count 0 is out of range; allowed: 1 or more"),
        ({"limit": 2.5}, "limit 2.5 is out of range; allowed: 2.0 or less"),
        ({"quaternion": (0.0, -2.0)}, "quaternion -2.0 is out of range; allowed: -1.0 to 1.0"),
    ],
)
def test_a_bad_value_is_refused_naming_field_value_and_what_is_allowed(values, message):
    with pytest.raises(UserError) as refused:
        Config(**values)
    assert str(refused.value) == message


def test_limits_are_inclusive():
    assert Config(gate__threshold=1.0, count=1, limit=2.0, quaternion=(-1.0, 1.0)).count == 1


@given(st.text())
def test_text_for_a_text_field_stays_what_it_is(text):
    assert from_text(Config, "text", text) == text


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("count", "3", 3),
        ("limit", "1", 1.0),
        ("limit", "-1e3", -1000.0),
        ("on", "False", False),
        ("on", "true", True),
    ],
)
def test_text_for_another_field_is_read_as_its_type(name, text, value):
    read = from_text(Config, name, text)
    assert (read, type(read)) == (value, type(value))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("count", "1.5", "count '1.5' is not a whole number"),
        ("count", "0", "count 0 is out of range; allowed: 1 or more"),
        ("limit", "much", "limit 'much' is not a number"),
        ("limit", "nan", "limit nan is out of range; allowed: 2.0 or less"),
        ("on", "1", "on '1' is not known; choose one of: true, false"),
        ("mode", "", "mode '' is not known; choose one of: slow, fast"),
    ],
)
def test_text_that_does_not_fit_is_refused(name, text, message):
    with pytest.raises(UserError) as refused:
        from_text(Config, name, text)
    assert str(refused.value) == message


def test_every_parameter_of_the_policy_node_is_described_and_its_default_allowed():
    PolicyNodeConfig()
    for spec in fields(PolicyNodeConfig):
        assert len(spec.metadata["description"]) > 10, spec.name
    assert {spec.name for spec in fields(PolicyNodeConfig) if not spec.metadata["read_only"]} == {
        "gate__threshold", "gate__mode", "gate__writes_per_second", "action_limit", "write_rate_window",
        "image_max_age", "proprio_max_age", "max_skew", "max_future",
    }  # fmt: skip


def test_an_autosave_in_a_folder_that_is_not_there_is_refused_at_configure(tmp_path):
    PolicyNodeConfig(memory__autosave=str(tmp_path / "memory.safetensors")).check_files()
    for path in (str(tmp_path / "no" / "memory.safetensors"), "a\0b/m"):
        with pytest.raises(UserError, match="is in no existing folder; make the folder"):
            PolicyNodeConfig(memory__autosave=path).check_files()


@pytest.mark.parametrize("field", ["checkpoint", "memory__checkpoint"])
@pytest.mark.parametrize("path", ["/no/where.safetensors", "a" * 256, "a\0b"], ids=["missing", "long", "nul"])
def test_a_file_that_is_not_there_is_refused_before_anything_heavy_starts(field, path):
    config = PolicyNodeConfig(**{field: path})
    with pytest.raises(UserError, match="; give ") as refused:
        config.check_files()
    assert str(refused.value).startswith(f"{field.replace('__', ' ')} '{path}' ")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("reference", [(), (0.0, 0.0, 1.0), (0.0, 0.0, 0.0, 0.0)])
def test_an_orientation_reference_that_is_no_quaternion_is_refused(reference):
    with pytest.raises(UserError, match="proprio.orientation_reference .* is not a quaternion"):
        PolicyNodeConfig(proprio__orientation_reference=reference)
