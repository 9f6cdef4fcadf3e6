"""nn.compile: a module as a quick function of arrays."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import pyggml as pg
from pyggml import ag, nn, optim
from pyggml.device import CpuDevice
from pyggml.dtypes import float32, int32


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)).eval()


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def called(model: nn.Module, *inputs: np.ndarray) -> np.ndarray:
    with ag.no_grad():
        return model(*inputs).numpy()


def test_it_gives_what_the_model_gives_for_every_shape_and_input():
    model = mlp()
    predict = nn.compile(model)
    for seed, batch in enumerate((1, 4, 1, 4, 7)):
        x = numbers(batch, 5, seed=seed)
        np.testing.assert_array_equal(predict(x), called(model, x))
        np.testing.assert_array_equal(predict(ag.tensor(x)), called(model, x))


def test_the_model_is_recorded_once_for_a_shape():
    calls = []

    class Counting(nn.Module):
        def forward(self, x):
            calls.append(x.shape)
            return x * 2.0

    predict = nn.compile(Counting().eval())
    for batch in (2, 3, 2, 3, 2):
        np.testing.assert_array_equal(predict(np.ones(batch)), np.full(batch, 2.0))
    assert calls == [(2,), (3,)]


def test_weights_are_those_of_the_moment():
    model = mlp()
    predict = nn.compile(model)
    x = numbers(4, 5)
    before = predict(x)
    opt = optim.AdamW(model.parameters(), lr=0.1)
    with ag.grad_tape():
        loss = ag.sum(ag.sqr(model(x)))
    ag.backward(loss)
    opt.step()
    assert not np.array_equal(predict(x), before)
    np.testing.assert_array_equal(predict(x), called(model, x))
    model[0].weight.assign(np.zeros((8, 5)))
    np.testing.assert_array_equal(predict(x), called(model, x))
    model.to(dtype="float16")
    np.testing.assert_array_equal(predict(x), called(model, x))


def replace_parameter(model):
    model[2].weight = ag.param(numbers(3, 8, seed=9))


def replace_layer(model):
    model.layers[1] = nn.Tanh().eval()


def add_layer(model):
    model.layers.append(nn.ReLU().eval())


@pytest.mark.parametrize("change", [replace_parameter, replace_layer, add_layer])
def test_what_the_model_is_made_of_is_that_of_the_moment(change):
    model = mlp()
    predict, x = nn.compile(model), numbers(4, 5)
    before = predict(x)
    change(model)
    assert not np.array_equal(predict(x), before)
    np.testing.assert_array_equal(predict(x), called(model, x))


def test_a_model_without_weights_runs_on_the_current_device():
    predict = nn.compile(nn.Tanh().eval())
    assert predict(np.ones(2)).dtype == np.float32
    with pg.device("reference"):
        assert predict(np.ones(2)).dtype == np.float64


def test_buffers_are_those_of_the_moment():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    predict = nn.compile(model)
    x = numbers(6, 3)
    for _ in range(2):
        model.train()
        model(x * 3.0)
        model.eval()
        np.testing.assert_array_equal(predict(x), called(model, x))


def test_averages_swapped_in_are_used():
    model = mlp()
    ema = optim.EMA(model.parameters())
    predict, x = nn.compile(model), numbers(2, 5)
    first = predict(x)
    model[0].weight.assign(np.ones((8, 5)))
    assert not np.array_equal(predict(x), first)
    with ema.applied():
        np.testing.assert_array_equal(predict(x), first)


def test_a_model_that_moved_runs_where_it_is():
    model = mlp()
    predict, x = nn.compile(model), numbers(2, 5)
    single = predict(x)
    model.to("reference")
    assert predict(x).dtype == np.float64
    np.testing.assert_allclose(predict(x), single, rtol=1e-5)


def test_structures_are_kept():
    class Two(nn.Module):
        def forward(self, x, y):
            return {"sum": x + y, "both": (x, [y * 2.0])}

    found = nn.compile(Two().eval())(np.ones(2), np.full(2, 3.0))
    np.testing.assert_array_equal(found["sum"], [4.0, 4.0])
    np.testing.assert_array_equal(found["both"][0], [1.0, 1.0])
    np.testing.assert_array_equal(found["both"][1][0], [6.0, 6.0])


def test_an_unused_input_is_harmless():
    class First(nn.Module):
        def forward(self, x, y):
            return x + 1.0

    predict = nn.compile(First().eval())
    for value in (1.0, 2.0):
        assert predict(np.float32(value), np.ones(3)) == value + 1.0


def test_recurrent_and_attention_models_agree_with_themselves():
    lstm = nn.LSTM(4, 6).eval()
    x = numbers(5, 3, 4)
    predict = nn.compile(lstm)
    for seed in (1, 2):
        x = numbers(5, 3, 4, seed=seed)
        with ag.no_grad():
            expected, (h, c) = lstm(x)
        found, (found_h, found_c) = predict(x)
        np.testing.assert_array_equal(found, expected.numpy())
        np.testing.assert_array_equal(found_h, h.numpy())
        np.testing.assert_array_equal(found_c, c.numpy())
    encoder = nn.TransformerEncoderLayer(8, 2, 16).eval()
    np.testing.assert_array_equal(
        nn.compile(encoder)(numbers(2, 5, 8)), called(encoder, numbers(2, 5, 8))
    )


def test_every_call_checks_its_indices():
    class Tokens(nn.Module):
        def __init__(self):
            self.table = nn.Embedding(7, 4)

        def forward(self, tokens):
            return self.table(ag.reshape(tokens, (-1,)))

    model = Tokens().eval()
    predict = nn.compile(model)
    for tokens in ([[0, 6], [1, 2]], [[3, 3], [0, 0]]):
        np.testing.assert_array_equal(predict(tokens), called(model, ag.tensor(tokens)))
    for wrong in (-1, 7):
        with pytest.raises(pg.IndexRangeError, match=rf"indices must be in \[0, 7\); got {wrong}"):
            predict([[0, wrong], [1, 2]])
        with pytest.raises(pg.IndexRangeError):
            nn.compile(model)([[wrong]])


def test_indices_are_checked_column_by_column():
    class Columns(nn.Module):
        def __init__(self):
            self.small, self.large = nn.Embedding(3, 2), nn.Embedding(100, 2)

        def forward(self, rows):
            return self.small(rows[:, 0]) + self.large(rows[:, 1])

    model = Columns().eval()
    predict = nn.compile(model)
    for rows in ([[0, 50], [2, 99]], [[1, 0], [1, 1]]):
        np.testing.assert_array_equal(predict(rows), called(model, ag.tensor(rows)))
    for wrong in ([3, 0], [0, 100], [-1, 0]):
        with pytest.raises(pg.IndexRangeError):
            predict([wrong, [0, 0]])


def test_integers_that_the_model_computes_are_refused_as_indices():
    class Best(nn.Module):
        def __init__(self):
            self.table = nn.Embedding(7, 4)

        def forward(self, x):
            return self.table(ag.argmax(x, axis=1))

    with pytest.raises(pg.PyggmlError, match="compile cannot check integers that are computed"):
        nn.compile(Best().eval())(numbers(2, 3))


def test_what_a_trace_cannot_hold_is_refused():
    class Reading(nn.Module):
        def forward(self, x):
            return x * ag.sum(x).item()

    class Drawing(nn.Module):
        def forward(self, x):
            return x + ag.rand(x.shape)

    class Odd(nn.Module):
        def forward(self, x):
            return "text"

    with pytest.raises(pg.PyggmlError, match="compile: the function reads a value"):
        nn.compile(Reading().eval())(np.ones(2))
    with pytest.raises(pg.PyggmlError, match="draws random numbers"):
        nn.compile(Drawing().eval())(np.ones(2))
    with pytest.raises(pg.PyggmlError, match="must return tensors.* got a str"):
        nn.compile(Odd().eval())(np.ones(2))
    with pytest.raises(pg.SettingError, match=r"call model\.eval\(\) first"):
        nn.compile(nn.Linear(2, 2))(np.ones((1, 2)))
    with pytest.raises(pg.DTypeError, match="compile: needs a module; got function"):
        nn.compile(lambda x: x)
    assert ag.sum(ag.rand((2,))).item() > 0  # recording goes on as ever


def test_training_mode_after_tracing_is_refused_too():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)).eval()
    predict = nn.compile(model)
    predict(np.ones((1, 2)))
    for part in (model, model[1]):
        part.train()
        with pytest.raises(pg.SettingError, match="training mode"):
            predict(np.ones((1, 2)))
        model.eval()
        predict(np.ones((1, 2)))


def test_a_step_being_recorded_is_not_disturbed():
    model = mlp()
    predict = nn.compile(model)
    x = numbers(3, 5)
    with ag.grad_tape():
        hidden = model(x)
        inside = predict(x)
        loss = ag.sum(hidden)
    np.testing.assert_array_equal(inside, hidden.numpy())
    assert ag.grad(loss, model[0].weight).shape == (8, 5)


def test_it_works_when_its_plan_was_dropped():
    model = mlp()
    predict, x = nn.compile(model), numbers(3, 5)
    first = predict(x)
    pg.device("cpu").device.clear_plans()
    np.testing.assert_array_equal(predict(x), first)


@pytest.mark.parametrize(("kind", "is_shared"), [(float32, True), (int32, False)])
def test_integers_are_copied_so_that_none_changes_after_its_check(kind, is_shared):
    array = np.ones(3, kind.numpy)
    lent = pg.device("cpu").device.lend(array, kind)
    assert np.shares_memory(lent.array, array) is is_shared


def test_many_shapes_keep_a_bounded_number_of_traces():
    predict = nn.compile(mlp())
    for batch in range(1, 90):
        assert predict(numbers(batch, 5)).shape == (batch, 3)
    assert len(predict._traces) == 64


# ---- optim.compile -------------------------------------------------------------------------------


def deep(kind: str = "float32") -> nn.Module:
    generator = np.random.default_rng(5)
    model = nn.Sequential(
        nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.25), nn.Linear(12, 3)
    )
    shapes = {name: p.shape for name, p in model.named_parameters()}
    model.load_state_dict(
        {name: generator.uniform(-0.5, 0.5, shape) for name, shape in shapes.items()}, strict=False
    )
    return model.to(dtype=kind)


def batches(count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return batches, some of them shorter."""
    generator = np.random.default_rng(8)
    sizes = [8, 8, 5, 8, 5, 8, 8, 8][:count]
    return [(numbers(n, 6, seed=i), generator.integers(3, size=n)) for i, n in enumerate(sizes)]


def eager_step(model, opt, x, y) -> float:
    opt.zero_grad()
    with ag.grad_tape():
        loss = ag.softmax_cross_entropy(model(ag.tensor(x)), y)
    ag.backward(loss)
    opt.step()
    return loss.item()


METHODS = {
    "AdamW with a schedule": lambda p: optim.AdamW(p, lr=optim.cosine_decay(lr=0.02, steps=10)),
    "SGD with clipped values": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, clip_value=0.05),
    "Adafactor": lambda p: optim.Adafactor(p, lr=0.05),
    "two groups": lambda p: optim.Adam(
        [{"params": p[:2], "lr_scale": 0.5}, {"params": p[2:], "weight_decay": 0.1}], lr=0.02
    ),
}


@pytest.mark.parametrize("kind", ["float32", "float16"])
@pytest.mark.parametrize("method", METHODS)
def test_compiled_steps_are_those_of_a_loop_to_the_last_bit(method, kind):
    results = []
    for compiled in (False, True):
        pg.manual_seed(3)
        model = deep(kind)
        opt = METHODS[method](list(model.parameters()))
        step = optim.compile(lambda x, y, m=model: ag.softmax_cross_entropy(m(x), y), opt)
        losses = [step(x, y) if compiled else eager_step(model, opt, x, y) for x, y in batches(8)]
        draws = pg.random.default_generator.state()
        results.append((losses, model.state_dict(), opt.state_dict(), draws))
    assert results[0][0] == results[1][0]
    assert results[0][3] == results[1][3]
    for plain, compiled in zip(results[0][1:3], results[1][1:3], strict=True):
        assert plain.keys() == compiled.keys()
        for name in plain:
            np.testing.assert_array_equal(plain[name], compiled[name], err_msg=name)


def test_inputs_are_left_as_they_are_and_may_have_any_layout():
    class Doubling(nn.Module):
        def forward(self, x):
            return x * 2.0, x, -x

    predict = nn.compile(Doubling().eval())
    base = numbers(6, 8)
    for x in (base, base[::2, ::-1], base.T, np.asfortranarray(base), base.astype(np.float64)):
        x = x if x.dtype == np.float64 else x.astype(np.float32, copy=False)
        kept = x.copy()
        twice, same, minus = predict(x)
        np.testing.assert_array_equal(twice, 2 * kept.astype(np.float32))
        np.testing.assert_array_equal(minus, -kept.astype(np.float32))
        np.testing.assert_array_equal(x, kept)
        same[...] = 0.0  # what comes back is nobody else's memory
        np.testing.assert_array_equal(x, kept)
    constant = np.ones(3, np.float32)
    constant.flags.writeable = False
    np.testing.assert_array_equal(predict(constant)[0], np.full(3, 2.0))


def test_the_loss_function_is_called_once_for_a_shape():
    model, calls = mlp().train(), []
    opt = optim.SGD(model.parameters(), lr=0.1)

    def loss(x, y):
        calls.append(x.shape)
        return ag.mse_loss(model(x), y)

    step = optim.compile(loss, opt)
    for batch in (4, 4, 2, 4, 2):
        step(numbers(batch, 5), numbers(batch, 3))
    assert calls == [(4, 5), (2, 5)] and opt.t == 5


def test_eager_and_compiled_steps_may_alternate_and_states_be_loaded():
    results = []
    for compiled in (False, True):
        pg.manual_seed(3)
        model = deep()
        opt = optim.AdamW(model.parameters(), lr=0.02)
        step = optim.compile(lambda x, y, m=model: ag.softmax_cross_entropy(m(x), y), opt)
        losses, saved = [], None
        for i, (x, y) in enumerate(batches(8)):
            if i == 3:
                saved = {name: np.copy(value) for name, value in opt.state_dict().items()}
            if i == 6:
                opt.load_state_dict(saved)
                model[0].weight.assign(np.ones((12, 6)))
            use = compiled and i % 3 != 1
            losses.append(step(x, y) if use else eager_step(model, opt, x, y))
        results.append((losses, model.state_dict()))
    assert results[0][0] == results[1][0]
    for name, value in results[0][1].items():
        np.testing.assert_array_equal(value, results[1][1][name])


def test_freezing_a_layer_and_moving_the_model_are_noticed():
    model = mlp().train()
    opt = optim.SGD(model.parameters(), lr=0.1)
    step = optim.compile(lambda x, y: ag.mse_loss(model(x), y), opt)
    x, y = numbers(4, 5), numbers(4, 3)
    step(x, y)
    model[0].requires_grad_(False)
    before = model[0].weight.numpy(), model[2].weight.numpy()
    step(x, y)
    np.testing.assert_array_equal(model[0].weight.numpy(), before[0])
    assert not np.array_equal(model[2].weight.numpy(), before[1])
    model[0].requires_grad_(True)
    step(x, y)
    assert not np.array_equal(model[0].weight.numpy(), before[0])
    model.to("reference")
    loss = ag.mse_loss(model(ag.tensor(x, device="reference")), ag.tensor(y, device="reference"))
    expected = loss.item()
    assert step(x, y) == pytest.approx(expected, rel=1e-12)


def test_modes_parts_and_buffers_of_the_model_are_noticed():
    model = deep()
    opt = optim.SGD(model.parameters(), lr=0.0)
    step = optim.compile(lambda x, y: ag.softmax_cross_entropy(model(x), y), opt)
    x, y = batches(1)[0]
    step(x, y)

    def plain() -> float:
        return ag.softmax_cross_entropy(model(ag.tensor(x)), y).item()

    model.eval()  # no dropout, running statistics
    assert step(x, y) == pytest.approx(plain(), rel=1e-6)
    model[1].running_mean.assign(np.full(12, 0.5))
    assert step(x, y) == pytest.approx(plain(), rel=1e-6)
    model.layers[3] = nn.ReLU()
    assert step(x, y) == pytest.approx(plain(), rel=1e-6)


def test_a_compiled_model_may_be_called_for_the_first_time_inside_a_compiled_loss():
    teacher = nn.compile(nn.Linear(6, 3).eval())
    model = deep()
    opt = optim.SGD(model.parameters(), lr=0.0)
    x, y = batches(1)[0]
    step = optim.compile(lambda x: ag.mse_loss(model(x), teacher(numbers(8, 6))), opt)
    assert len({step(x) for _ in range(4)}) == 4  # dropout draws anew
    assert model[1].num_batches_tracked.item() == 4
    reads = optim.compile(lambda x: ag.sum(model(x)) * teacher(x.numpy())[0, 0], opt)
    with pytest.raises(pg.PyggmlError, match="reads a value"):
        reads(x)


@pytest.mark.parametrize("setting", ["clip_norm", "accumulate_steps"])
def test_a_setting_that_cannot_be_compiled_is_noticed_when_it_is_set_later(setting):
    model = mlp().train()
    opt = optim.SGD(model.parameters(), lr=0.1)
    step = optim.compile(lambda x, y: ag.mse_loss(model(x), y), opt)
    step(numbers(4, 5), numbers(4, 3))
    setattr(opt, setting, 2)
    with pytest.raises(pg.SettingError, match=f"compile: .*{setting}=2"):
        step(numbers(4, 5), numbers(4, 3))


def test_what_is_recorded_after_compiled_calls_has_nothing_to_do_with_them():
    model = mlp().train()
    opt = optim.SGD(model.parameters(), lr=0.1)
    step = optim.compile(lambda x, y: ag.mse_loss(model(x), y), opt)
    predict = nn.compile(mlp())
    x, y = numbers(4, 5), numbers(4, 3)
    with pytest.raises(pg.ShapeError):
        step(x, numbers(3, 3))
    for _ in range(2):
        step(x, y)
        out = predict(x)
        assert ag.mse_loss(ag.tensor(out), y).item() == pytest.approx(np.mean((out - y) ** 2))


def test_labels_are_checked_in_every_step_and_a_wrong_one_changes_nothing():
    model = mlp().train()
    opt = optim.SGD(model.parameters(), lr=0.1)
    step = optim.compile(lambda x, y: ag.softmax_cross_entropy(model(x), y), opt)
    step(numbers(4, 5), [0, 1, 2, 0])
    before = model.state_dict()
    with pytest.raises(pg.IndexRangeError, match=r"in \[0, 3\); got 3"):
        step(numbers(4, 5), [0, 1, 3, 0])
    assert opt.t == 1
    for name, value in model.state_dict().items():
        np.testing.assert_array_equal(value, before[name])


def test_gradients_that_somebody_collects_are_left_alone():
    model = mlp().train()
    opt = optim.SGD(model.parameters(), lr=0.1)
    step = optim.compile(lambda x, y: ag.mse_loss(model(x), y), opt)
    step(numbers(4, 5), numbers(4, 3))
    assert all(p.grad is None for p in model.parameters())


def test_memory_does_not_grow_with_compiled_steps():
    model = mlp().train()
    opt = optim.AdamW(model.parameters())
    step = optim.compile(lambda x, y: ag.mse_loss(model(x), y), opt)
    x, y = numbers(4, 5), numbers(4, 3)
    counts = []
    for _ in range(3):
        for _ in range(20):
            step(x, y)
        gc.collect()
        counts.append(len(gc.get_objects()))
    assert counts[2] - counts[1] < 20


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"accumulate_steps": 2}, "accumulate_steps=2"),
        ({"clip_norm": 1.0}, "clip_norm=1.0"),
        ({"loss_scale": 2.0}, "loss_scale=LossScale"),
    ],
)
def test_optimizers_that_need_more_than_one_run_are_refused(settings, message):
    w = ag.param([1.0])
    opt = optim.SGD([w], lr=0.1, **settings)
    with pytest.raises(pg.SettingError, match=f"compile: .*{message}"):
        optim.compile(lambda x: ag.sum(w * x), opt)


@pytest.mark.parametrize(
    "loss, error, message",
    [
        (lambda x, w: w * x, pg.ShapeError, r"one element; got shape \(2,\)"),
        (lambda x, w: 1.0, pg.ShapeError, "one element; got float"),
        (lambda x, w: ag.sum(x), pg.GradError, "does not depend on a parameter"),
        (lambda x, w: ag.sum(w * x) * x.numpy()[0], pg.PyggmlError, "reads a value"),
        (lambda x, w: ag.sum(w * ag.randn((2,))), pg.PyggmlError, "draws random numbers"),
        (
            lambda x, w: ag.softmax_cross_entropy(w, ag.argmax(x), ignore_index=0),
            pg.PyggmlError,
            "reads a value",
        ),
    ],
)
def test_losses_that_cannot_be_compiled_are_refused_and_change_nothing(loss, error, message):
    w = ag.param([1.0, 2.0])
    opt = optim.SGD([w], lr=0.1)
    with pytest.raises(error, match=message):
        optim.compile(lambda x: loss(x, w), opt)([1.0, 1.0])
    assert w.tolist() == [1.0, 2.0] and opt.t == 0
    assert eager_step_of(w, opt) == 3.0


def eager_step_of(w, opt) -> float:
    with ag.grad_tape():
        total = ag.sum(w)
    ag.backward(total)
    opt.step()
    return total.item()


def test_compile_takes_a_function_and_an_optimizer():
    w = ag.param([1.0])
    with pytest.raises(pg.PyggmlError, match="compile: loss must be"):
        optim.compile(None, optim.SGD([w], lr=0.1))
    with pytest.raises(pg.DTypeError, match="compile: needs an optimizer; got list"):
        optim.compile(lambda x: x, [w])


def test_a_frozen_part_is_that_of_the_moment():
    body, head = mlp().requires_grad_(False), nn.Linear(3, 1)
    opt = optim.SGD(head.parameters(), lr=0.0)
    step, x = optim.compile(lambda x: ag.sum(head(body(x))), opt), numbers(2, 5)
    step(x)
    body.to(dtype="float16")  # other memory
    body[2].weight.assign(np.ones((3, 8)))
    np.testing.assert_allclose(step(x), called(head, body(ag.tensor(x))).sum(), rtol=1e-5)


@pytest.mark.parametrize("compiled", [False, True])
def test_ctrl_c_just_after_an_update_loses_nothing_of_it(compiled, monkeypatch):
    results = []
    for interrupted in (False, True):
        pg.manual_seed(3)
        model = deep()
        opt = optim.AdamW(model.parameters(), lr=0.02)
        step = optim.compile(lambda x, y, m=model: ag.softmax_cross_entropy(m(x), y), opt)
        compute = CpuDevice.compute

        def then_interrupt(self, *arguments, compute=compute):
            compute(self, *arguments)
            if self.has_committed:  # as when a signal's handler raises at the end of the call
                raise KeyboardInterrupt

        for i, (x, y) in enumerate(batches(4)):
            with monkeypatch.context() as patch:
                if interrupted and i == 1:
                    patch.setattr(CpuDevice, "compute", then_interrupt)
                try:
                    step(x, y) if compiled else eager_step(model, opt, x, y)
                    assert not (interrupted and i == 1)
                except KeyboardInterrupt:
                    assert interrupted and i == 1
        results.append((model.state_dict(), opt.state_dict()))
    for plain, after in zip(*results, strict=True):
        assert plain.keys() == after.keys()
        for name in plain:
            np.testing.assert_array_equal(plain[name], after[name], err_msg=name)
