"""Plans: equal steps share one, outputs are nobody else's memory, and the cache is bounded."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest

import pyggml as pg
from pyggml import ag, graph, nn, optim
from pyggml._ffi import lib


@pytest.fixture
def cpu():
    found = pg.devices()[0]
    found.clear_plans()
    return found


def train_step(model, opt, x, y):
    opt.zero_grad()
    with ag.grad_tape():
        loss = ag.softmax_cross_entropy(model(ag.tensor(x)), y)
    ag.backward(loss)
    opt.step()
    return loss.item()


def make_model(seed=0):
    pg.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))


def test_steps_that_differ_in_data_learning_rate_and_step_number_share_one_plan(cpu):
    model, generator = make_model(), np.random.default_rng(0)
    opt = optim.AdamW(model.parameters(), lr=1e-2)
    for i in range(5):
        opt.lr = 1e-2 / (i + 1)
        train_step(model, opt, generator.standard_normal((4, 5)), generator.integers(0, 3, 4))
    assert len(cpu.plans) == 1


def test_a_second_model_of_the_same_shape_uses_the_plan_of_the_first(cpu):
    x, y = np.ones((4, 5)), np.zeros(4, int)
    for seed in range(3):
        model = make_model(seed)
        train_step(model, optim.AdamW(model.parameters()), x, y)
    assert len(cpu.plans) == 1


def test_another_batch_size_is_another_plan_and_going_back_is_none(cpu):
    model = make_model()
    opt = optim.AdamW(model.parameters())
    for rows in (4, 2, 4, 2):
        train_step(model, opt, np.ones((rows, 5)), np.zeros(rows, int))
    assert len(cpu.plans) == 2


def test_plans_that_share_the_working_buffer_do_not_disturb_each_other(cpu):
    generator = np.random.default_rng(3)
    w = ag.param(generator.standard_normal((16, 16)))
    reference = w.numpy().astype(float)
    for rows in (4, 400, 4, 30, 400):
        x = generator.standard_normal((rows, 16))
        with ag.grad_tape():
            loss = ag.mean(ag.relu(ag.tensor(x) @ w))
        w.grad = None
        ag.backward(loss)
        h = x.astype(np.float32) @ reference
        assert loss.item() == pytest.approx(np.maximum(h, 0).mean(), rel=1e-5)
        np.testing.assert_allclose(w.grad.numpy(), x.T @ (h > 0) / h.size, atol=1e-6)


def test_graphs_of_equal_size_and_other_lifetimes_get_places_of_their_own(cpu):
    """ggml takes a graph with as many nodes of the same sizes for the one it has places for."""
    generator = np.random.default_rng(0)
    arrays = [generator.standard_normal((64, 64)) / 8 for _ in range(2)]

    def run(x, y, keep_first):
        t1 = x @ x
        t3 = (t1 @ x) @ x
        t4 = (t1 if keep_first else t3) @ y  # t3 may stand where t1 stood, or not
        return t3 @ t4

    for keep_first in (False, True, False):
        ours = run(*map(ag.tensor, arrays), keep_first).numpy()
        np.testing.assert_allclose(ours, run(*arrays, keep_first), atol=1e-4)


def test_results_of_an_earlier_run_survive_later_runs_of_the_same_plan(cpu):
    x = ag.tensor([1.0, 2.0])
    results = []
    for i in range(4):
        results.append(x * ag.tensor([float(i), 1.0]))
        results[-1].numpy()
    assert [r.tolist() for r in results] == [[0.0, 2.0], [1.0, 2.0], [2.0, 2.0], [3.0, 2.0]]


def test_the_plan_cache_is_bounded(cpu, monkeypatch):
    monkeypatch.setattr(cpu, "max_plans", 5)
    for n in range(1, 20):
        assert ag.sum(ag.tensor(np.ones(n)) * 2.0).item() == 2.0 * n
    assert len(cpu.plans) == 5


def test_the_plan_cache_is_bounded_in_bytes_too(cpu, monkeypatch):
    def sums(count):
        for n in range(1, count + 1):
            assert ag.sum(ag.tensor(np.ones(n)) * 2.0).item() == 2.0 * n

    cpu.clear_plans()
    sums(1)
    (one,) = [plan.held_bytes for plan in cpu.plans.values()]
    monkeypatch.setattr(cpu, "max_plan_bytes", 3 * one + one // 2)
    sums(10)
    newest = list(cpu.plans)[-3:]
    assert list(cpu.plans) == newest and len(newest) == 3
    monkeypatch.setattr(cpu, "max_plan_bytes", 0)
    sums(2)
    assert len(cpu.plans) == 1  # what runs is kept, however large it is


def test_a_plan_counts_the_bytes_of_its_graph(cpu):
    def bytes_of_chain(length):
        cpu.clear_plans()
        x = ag.tensor([1.0])
        for _ in range(length):
            x = ag.tanh(x)
        x.numpy()
        (plan,) = cpu.plans.values()
        assert plan.held_bytes > lib.ggml_used_mem(plan.context)
        return plan.held_bytes

    per_node = (bytes_of_chain(3000) - bytes_of_chain(1000)) / 2000
    assert per_node > lib.ggml_tensor_overhead()


def test_a_plan_counts_the_small_outputs_that_it_keeps(cpu):
    def bytes_of(n):
        cpu.clear_plans()
        ag.tanh(ag.tensor(np.ones(n))).numpy()
        (plan,) = cpu.plans.values()
        return plan.held_bytes

    assert bytes_of(1001) - bytes_of(1) == 4000


def test_the_working_buffer_shrinks_when_the_plan_that_needed_it_goes(cpu, monkeypatch):
    cpu.clear_plans()
    monkeypatch.setattr(cpu, "max_plans", 2)

    def run(n):
        x = ag.tensor(np.ones(n))
        return ag.sum(ag.tanh(x) * ag.exp(x)).item()

    first = run(1_000_000)
    large = cpu._working.array.nbytes
    run(1_000)
    assert cpu._working.array.nbytes == large
    run(2_000)  # the large plan goes
    run(1_000)
    assert cpu._working.array.nbytes < large / 100
    assert run(1_000_000) == first


def test_the_node_table_is_bounded_and_clearing_it_loses_no_value(monkeypatch):
    monkeypatch.setattr(graph, "MAX_NODES", 50)
    w = ag.param([1.0])
    with ag.grad_tape():
        total = w
        for i in range(200):
            total = total * 1.0 + float(i)
    assert len(graph._nodes) <= 51
    ag.backward(total)
    assert total.item() == 1.0 + sum(range(200))
    assert w.grad.item() == 1.0


def test_a_model_that_is_dropped_leaves_nothing_behind(cpu):
    def run():
        model = make_model()
        opt = optim.AdamW(model.parameters())
        train_step(model, opt, np.ones((4, 5)), np.zeros(4, int))

    run()
    gc.collect()
    before = sum(type(o) in (graph.Source, graph.Frame) for o in gc.get_objects())
    gc.disable()
    try:
        for _ in range(20):
            run()
        after = sum(type(o) in (graph.Source, graph.Frame) for o in gc.get_objects())
    finally:
        gc.enable()
    assert after <= before + 2


def test_twenty_thousand_recorded_ops_run_under_the_default_recursion_limit():
    w = ag.param([1.0])
    with ag.grad_tape():
        x = w
        for _ in range(20_000):
            x = x + w
    ag.backward(x)
    assert x.item() == 20_001.0
    assert w.grad.item() == 20_001.0


def test_equal_seeds_give_bit_equal_training_whatever_ran_before():
    def losses():
        model = make_model(7)
        opt = optim.AdamW(model.parameters(), lr=1e-2)
        generator = np.random.default_rng(0)
        return [
            train_step(model, opt, generator.standard_normal((64, 5)), generator.integers(0, 3, 64))
            for _ in range(10)
        ]

    assert losses() == losses()


@pytest.mark.parametrize("n_threads", [1, 2, 3])
def test_any_thread_count_gives_the_right_product(n_threads):
    generator = np.random.default_rng(5)
    a, b = generator.standard_normal((130, 70)), generator.standard_normal((70, 90))
    before = pg.get_num_threads()
    try:
        pg.set_num_threads(n_threads)
        product = (ag.tensor(a) @ ag.tensor(b)).numpy()
    finally:
        pg.set_num_threads(before)
    np.testing.assert_allclose(product, a @ b, atol=1e-4)


@pytest.mark.parametrize("wrong", [0, -1, 2.0, True, "2", 10**6])
def test_a_thread_count_that_is_not_a_positive_integer_is_refused(wrong):
    with pytest.raises(
        pg.SettingError, match=r"set_num_threads: n_threads must be a positive integer, at most \d+"
    ):
        pg.set_num_threads(wrong)


def test_a_changed_thread_count_reaches_plans_that_exist(cpu, monkeypatch):
    used = []
    original = type(cpu).compute

    def compute(self, graph, n_threads=1):
        used.append(n_threads)
        return original(self, graph, n_threads)

    monkeypatch.setattr(type(cpu), "compute", compute)
    before = pg.get_num_threads()
    a = np.ones((300, 300))
    try:
        for n_threads in (1, 2, 1):
            pg.set_num_threads(n_threads)
            (ag.tensor(a) @ ag.tensor(a)).numpy()
    finally:
        pg.set_num_threads(before)
    assert used == [1, 2, 1]


def test_a_graph_may_leave_more_holes_in_memory_than_ggmls_own_allocator_bears():
    x = ag.tensor(np.ones(64))
    p = q = u = x
    held = []
    for _ in range(400):
        p = ag.tanh(p)
        q = ag.tanh(q + p)
        held += [p, q]
    for value in held:
        u = u + value
    del held, value, p, q
    array = np.ones(64)
    p = q = total = array
    for _ in range(400):
        p = np.tanh(p)
        q = np.tanh(q + p)
        total = total + p + q
    np.testing.assert_allclose(u.numpy(), total, rtol=1e-4)


def test_two_threads_that_read_one_pending_value_compute_it_once():
    for _ in range(20):
        w = ag.param([1.0])
        for _ in range(2):
            with ag.grad_tape():
                loss = ag.sum(w * 2.0)
            ag.backward(loss)
        seen = []
        readers = [threading.Thread(target=lambda: seen.append(w.grad.item())) for _ in range(2)]  # noqa: B023
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        assert seen == [4.0, 4.0]


def test_evaluating_while_a_loss_is_held_shares_one_plan_and_keeps_no_batches(cpu):
    w = ag.param(np.ones((4, 4)))
    with ag.grad_tape():
        loss = ag.mean(ag.tensor(np.ones((2, 4))) @ w)
    loss.item()
    cpu.clear_plans()
    for i in range(10):
        (ag.tensor(np.full((2, 4), float(i))) @ w).numpy()
    assert len(cpu.plans) == 1
    assert len(loss._at[0].sources) == 2
    ag.backward(loss)
    assert w.grad.shape == (4, 4)


def test_own_kernels_take_the_place_of_an_input_that_nobody_needs_any_more():
    x = np.random.default_rng(6).standard_normal((64, 64))
    once = ag.tanh(ag.tensor(x))
    value = ag.maximum(ag.sigmoid(ag.gelu(once)), 0.6)
    value = ag.softmax(ag.exp(value))
    value = ag.neg(ag.relu(value - np.ones((64, 1)) / 64))
    del once
    assert ag.plan_report(value).bytes["activations"] < 2 * 64 * 64 * 4

    def expected():
        with pg.device("reference"):
            h = ag.sigmoid(ag.gelu(ag.tanh(ag.tensor(x))))
            h = ag.softmax(ag.exp(ag.maximum(h, 0.6)))
            return ag.neg(ag.relu(h - np.ones((64, 1)) / 64)).numpy()

    np.testing.assert_allclose(value.numpy(), expected(), rtol=1e-5, atol=1e-7)
