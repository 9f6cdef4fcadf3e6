"""What people can ask of a recorded program: its plan, what it keeps, its first NaN, a budget."""

from __future__ import annotations

import numpy as np
import pytest

import pyggml as pg
from pyggml import ag, nn, optim

WIDTH, BATCH = 32, 64
VALUE = WIDTH * BATCH * 4  # bytes of one activation


def chain(depth, *, segment=None, **tape):
    """Record a chain of matmul and relu; return its loss and its weights."""
    generator = np.random.default_rng(0)
    scale = np.sqrt(2 / WIDTH)
    weights = [ag.param(generator.standard_normal((WIDTH, WIDTH)) * scale) for _ in range(depth)]
    x = ag.tensor(generator.standard_normal((BATCH, WIDTH)))

    def part(h, first, last):
        for w in weights[first:last]:
            h = ag.relu(h @ w)
        return h

    with ag.grad_tape(**tape):
        if segment is None:
            x = part(x, 0, depth)
        else:
            for i in range(0, depth, segment):
                x = ag.checkpoint(part, x, i, i + segment)
        loss = ag.mean(x * x)
    return loss, weights


def gradients(*args, **kwargs):
    loss, weights = chain(*args, **kwargs)
    ag.backward(loss)
    report = ag.plan_report(loss)
    return report, [w.grad.numpy() for w in weights]


# ---- plan_report ----


def test_the_report_counts_bytes_by_purpose():
    loss, weights = chain(3)
    ag.backward(loss)
    report = ag.plan_report(loss)
    assert report.bytes["parameters"] == 3 * WIDTH * WIDTH * 4
    assert report.bytes["inputs"] == VALUE
    assert report.bytes["gradients"] == 3 * WIDTH * WIDTH * 4
    assert report.bytes["outputs"] == 4
    assert report.bytes["activations"] >= 3 * VALUE
    assert [line.name for line in report.ops].count("relu_back") == 3
    assert report.fallbacks == []
    assert "matmul" in str(report)


def test_the_report_changes_nothing():
    loss, weights = chain(2)
    ag.backward(loss)
    before = ag.plan_report(loss)
    assert ag.plan_report(loss).bytes == before.bytes
    assert np.isfinite(loss.item())
    with pytest.raises(pg.PyggmlError, match="plan_report: nothing is pending"):
        ag.plan_report(loss)


def test_planned_bytes_are_the_same_after_the_plan_has_run():
    first = gradients(4)[0]
    assert gradients(4)[0].bytes == first.bytes


def test_the_drawing_has_a_box_for_each_op_and_each_source():
    loss, _ = chain(1)
    source = ag.plan_report(loss).draw().source
    for label in ("matmul", "relu", "parameter", "input", f"[{BATCH}, {WIDTH}]"):
        assert label in source


# ---- saved_tensors ----


def test_saved_tensors_names_op_shape_bytes_and_line():
    loss, _ = chain(3)
    ag.backward(loss)
    kept = ag.saved_tensors(loss)
    assert [(k.op, k.shape, k.bytes) for k in kept] == [("relu", (BATCH, WIDTH), VALUE)] * 3
    assert all(".py:" in k.line for k in kept)


def test_saved_tensors_of_segments_are_what_crosses_their_borders():
    loss, _ = chain(6, segment=3)
    ag.backward(loss)
    assert [k.op for k in ag.saved_tensors(loss)] == ["relu", "relu"]


# ---- memory budget ----


def test_a_budget_is_kept_and_the_gradients_are_equal_to_the_last_bit():
    plain, expected = gradients(24)
    for share in (0.9, 0.7, 0.55):
        budget = int(plain.bytes["activations"] * share)
        fitted, got = gradients(24, memory_budget=budget)
        assert fitted.bytes["activations"] <= budget
        assert len(fitted.ops) > len(plain.ops)
        for right, ours in zip(expected, got, strict=True):
            np.testing.assert_array_equal(ours, right)


def test_a_smaller_budget_costs_more_recomputation():
    plain = gradients(24)[0]
    counts = []
    for share in (1.0, 0.8, 0.55):
        budget = int(plain.bytes["activations"] * share)
        counts.append(len(gradients(24, memory_budget=budget)[0].ops))
    assert counts == sorted(counts)
    assert counts[0] == len(plain.ops)


def test_a_budget_that_no_plan_keeps_is_an_error_with_the_smallest_that_would():
    loss, _ = chain(16, memory_budget=1000)
    ag.backward(loss)
    with pytest.raises(pg.MemoryBudgetError, match="no plan fits in 1,000 bytes; the smallest"):
        loss.item()


def test_the_smallest_budget_of_the_error_is_enough():
    loss, _ = chain(16, memory_budget=1000)
    ag.backward(loss)
    with pytest.raises(pg.MemoryBudgetError) as caught:
        loss.item()
    smallest = int(str(caught.value).rsplit(" ", 1)[1].replace(",", ""))
    fitted, _ = gradients(16, memory_budget=smallest)
    assert fitted.bytes["activations"] <= smallest


def test_root_segments_make_memory_grow_like_the_root_of_the_depth():
    peaks = {depth: gradients(depth, memory_budget="sqrt")[0] for depth in (16, 64, 144)}
    growth = {depth: report.bytes["activations"] / VALUE for depth, report in peaks.items()}
    assert growth[64] / growth[16] < 2.6  # the root would be 2, plain is 4
    assert growth[144] / growth[16] < 4.0  # the root would be 3, plain is 9


def test_a_budget_works_with_segments_of_the_user_and_with_an_optimizer():
    loss, weights = chain(12, segment=4, memory_budget="sqrt")
    opt = optim.SGD(weights, lr=0.1)
    ag.backward(loss)
    opt.step()
    got = [w.numpy() for w in weights]
    loss, weights = chain(12)
    opt = optim.SGD(weights, lr=0.1)
    ag.backward(loss)
    opt.step()
    for right, ours in zip([w.numpy() for w in weights], got, strict=True):
        np.testing.assert_array_equal(ours, right)


@pytest.mark.parametrize("wrong", [0, -5, 1.5, "root", True])
def test_a_budget_is_a_positive_number_of_bytes_or_sqrt(wrong):
    with pytest.raises(pg.SettingError, match="memory_budget must be a positive integer"):
        ag.grad_tape(memory_budget=wrong)


@pytest.mark.parametrize("wrap", ["module", "every"])
def test_checkpointed_modules_have_the_same_names_and_gradients(wrap):
    def make(checkpointed):
        pg.manual_seed(0)
        layers = [nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU()]
        if not checkpointed:
            return nn.Sequential(*layers)
        if wrap == "every":
            return nn.Sequential(*layers, checkpoint_every=2)
        return nn.checkpoint(nn.Sequential(*layers))

    found = []
    for model in (make(False), make(True)):
        with ag.grad_tape():
            loss = ag.mean(model(ag.tensor(np.linspace(-1, 1, 32).reshape(4, 8))))
        ag.backward(loss)
        found.append({name: p.grad.numpy() for name, p in model.named_parameters()})
    assert list(found[0]) == list(found[1])
    for name in found[0]:
        np.testing.assert_array_equal(found[1][name], found[0][name])


# ---- detect_anomaly ----


def test_the_first_nan_is_named_with_its_op_shapes_and_line():
    x = ag.tensor([[1.0, -1.0]])
    with ag.detect_anomaly():
        y = ag.exp(ag.log(x))  # this line
        with pytest.raises(pg.AnomalyError) as caught:
            y.numpy()
    message = str(caught.value)
    assert "log made nan at index (0, 1) of its result, shape (1, 2)" in message
    assert "test_report.py" in message
    assert message.endswith("y = ag.exp(ag.log(x))  # this line")


def test_an_infinity_in_the_backward_pass_names_the_forward_line():
    w = ag.param([0.0, 1.0])
    with ag.detect_anomaly():
        with ag.grad_tape():
            loss = ag.sum(ag.sqrt(w))  # forward is finite
        ag.backward(loss)
        with pytest.raises(pg.AnomalyError, match=r"in the gradient of sqrt, .*forward is finite"):
            loss.item()


def test_a_value_that_fails_the_check_does_not_stand_in_the_way_of_others():
    with ag.detect_anomaly():
        bad = ag.log(ag.tensor([-1.0]))
        with pytest.raises(pg.AnomalyError):
            bad.numpy()
        assert (ag.tensor([1.0]) * 2.0).tolist() == [2.0]
    assert np.isnan(bad.numpy()).all()


def test_a_step_that_fails_the_check_updates_nothing():
    w = ag.param([-1.0])
    opt = optim.AdamW([w])
    with ag.detect_anomaly():
        with ag.grad_tape():
            loss = ag.sum(ag.log(w))
        ag.backward(loss)
        with pytest.raises(pg.AnomalyError, match="log made nan"):
            opt.step()
    assert w.item() == -1.0
    assert opt.t == 0


def test_a_finite_program_passes_the_check_with_the_same_result():
    def loss_value():
        loss, weights = chain(3)
        ag.backward(loss)
        return loss.item(), weights[0].grad.numpy().sum()

    expected = loss_value()
    with ag.detect_anomaly():
        assert loss_value() == expected
    assert loss_value() == expected
