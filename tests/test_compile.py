"""nn.compile: a module as a quick function of arrays."""

from __future__ import annotations

import numpy as np
import pytest

import pyggml as pg
from pyggml import ag, nn, optim


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
    model[2].weight = ag.param(numbers(3, 8, seed=9))
    model.to(dtype="float16")
    np.testing.assert_array_equal(predict(x), called(model, x))
    ema = optim.EMA(mlp().parameters())
    del ema


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


def test_integers_that_the_model_computes_are_refused_as_indices():
    class Best(nn.Module):
        def __init__(self):
            self.table = nn.Embedding(7, 4)

        def forward(self, x):
            return self.table(ag.argmax(x, axis=1))

    with pytest.raises(pg.PyggmlError, match="compile cannot check integers that the model"):
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

    with pytest.raises(pg.PyggmlError, match="reads a value that it computes"):
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
    model.train()
    with pytest.raises(pg.SettingError, match="training mode"):
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


def test_many_shapes_keep_a_bounded_number_of_traces():
    predict = nn.compile(mlp())
    for batch in range(1, 90):
        assert predict(numbers(batch, 5)).shape == (batch, 3)
    assert len(predict._traces) == 64
