"""What a variant costs: the paper's parameter counts to the digit, and peaks that count what is really allocated."""

from __future__ import annotations

import pytest
import torch

from aura_ros.bench.recall import counts as counts_module
from aura_ros.bench.recall import paper
from aura_ros.bench.recall.counts import counts, peak, table
from aura_ros.errors import UserError


@pytest.fixture(scope="module")
def at_32():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counts_module, "peak", lambda work, device: 7)
        return list(counts(batch=2, sizes=[32]))


@pytest.mark.parametrize("size", [16, 32, 64])
def test_parameters_are_those_of_the_papers_table_6(size, monkeypatch):
    monkeypatch.setattr(counts_module, "peak", lambda work, device: 0)
    monkeypatch.setattr(counts_module, "gradient_active", lambda config, task: 0)
    found = list(counts(sizes=[size]))
    assert len(found) == 8
    for count in found:
        assert (
            count.parameters == count.published == paper.PARAMETERS[count.variant][(16, 32, 64).index(size)]
        )


def test_gradient_reaches_what_the_paper_counts(at_32):
    active = {count.variant: count.gradient_active for count in at_32}
    for variant, published in paper.GRADIENT_ACTIVE.items():
        assert active[variant] == published


def test_state_bytes_are_the_tensors_own(at_32):
    carried = {count.variant: count.state_bytes for count in at_32}
    assert carried["aura"] == 4224
    assert carried["no_memory"] == 0
    assert carried["full_recurrence"] == 4 * 53


def test_peak_counts_what_lives_at_once_not_what_was_ever_allocated():
    def one_after_the_other():
        for _ in range(3):
            torch.zeros(1_000_000)

    def all_at_once():
        held = [torch.zeros(1_000_000) for _ in range(3)]
        del held

    assert peak(one_after_the_other, "cpu") == pytest.approx(4e6, rel=0.02)
    assert peak(all_at_once, "cpu") == pytest.approx(12e6, rel=0.02)


def test_training_peak_grows_with_the_batch_and_inference_holds_the_weights():
    one, two = (next(iter(counts(batch=batch, sizes=[8]))) for batch in (2, 8))
    assert two.training_peak > 1.5 * one.training_peak
    assert one.inference_peak == two.inference_peak
    assert one.published is None
    assert one.inference_peak > 4 * one.trained


def test_text_says_how_peaks_were_found_and_keeps_the_papers_apart(at_32):
    text = table(at_32, 2, "cpu")
    assert "torch.profiler" in text
    assert "43,051,008 bytes, is another quantity" in text
    assert "max_memory_allocated" in table(at_32, 2, "cuda")


@pytest.mark.parametrize(
    ("options", "said"),
    [({"device": "tpu"}, "device 'tpu' is unknown; choose one of: cpu, cuda"), ({"batch": 0}, "batch 0"),
     ({"sizes": [0]}, "dk is 0"), ({"sizes": []}, "no size")],
)  # fmt: skip
def test_a_wrong_option_is_one_line(options, said):
    with pytest.raises(UserError, match=said) as refused:
        list(counts(**options))
    assert "\n" not in str(refused.value)


def test_cuda_where_there_is_none_is_one_line(monkeypatch):
    # On a machine with a GPU too: torch is told that there is none.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="device 'cuda' is not here"):
        list(counts(device="cuda"))
