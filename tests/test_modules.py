"""Modules: what they are made of, their modes, their values in and out, and how they are shown."""

from __future__ import annotations

import copy

import numpy as np
import pytest

import pyggml as pg
from pyggml import ag, nn, optim


@pytest.fixture(params=["cpu", "reference"], autouse=True)
def device(request):
    with pg.device(request.param) as found:
        yield found


class Block(nn.Module):
    """A module of every kind of member, whose class does not call super().__init__()."""

    def __init__(self):
        self.scale = ag.param([2.0])
        self.count = nn.buffer(0)
        self.first = nn.Linear(2, 3)
        self.rest = [nn.Linear(3, 3), (nn.Linear(3, 3), nn.Dropout(0.5))]
        self.heads = {"a": nn.Linear(3, 1), "b": nn.BatchNorm1d(3)}
        self.weights = [ag.param([1.0]), ag.param([3.0])]
        self.note = "a plain value"

    def forward(self, x):
        x = self.rest[0](self.first(x)) * self.scale
        return self.heads["a"](self.rest[1][1](self.rest[1][0](x)))


def train_once(model, x, opt=None):
    with ag.grad_tape():
        loss = ag.mean(ag.sqr(model(ag.tensor(x))))
    ag.backward(loss)
    if opt is not None:
        opt.step()
    return loss


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


# ---- what a module is made of --------------------------------------------------------------------


def test_members_are_found_in_attributes_lists_tuples_and_dicts():
    block = Block()
    assert [name for name, _ in block.named_parameters()] == [
        "scale", "weights.0", "weights.1", "first.weight", "first.bias", "rest.0.weight",
        "rest.0.bias", "rest.1.0.weight", "rest.1.0.bias", "heads.a.weight", "heads.a.bias",
        "heads.b.weight", "heads.b.bias",
    ]  # fmt: skip
    assert [name for name, _ in block.named_buffers()] == [
        "count", "heads.b.running_mean", "heads.b.running_var", "heads.b.num_batches_tracked"
    ]  # fmt: skip
    assert [name for name, _ in block.named_children()] == [
        "first", "rest.0", "rest.1.0", "rest.1.1", "heads.a", "heads.b"
    ]  # fmt: skip
    assert len(block.parameters()) == 13
    assert len(block.buffers()) == 4
    assert block.modules() == [block, *block.children()]


def test_a_sequence_names_its_layers_by_number_as_pytorch_does():
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Sequential(nn.Linear(3, 1)))
    assert list(model.state_dict()) == ["0.weight", "0.bias", "2.0.weight", "2.0.bias"]
    assert len(model) == 3
    assert model[0] is next(iter(model))


def test_a_sequence_takes_functions_and_refuses_what_cannot_be_called():
    model = nn.Sequential(nn.Linear(2, 2), ag.relu, lambda x: x + 1.0)
    assert model(ag.tensor(np.ones((1, 2)))).numpy().min() >= 1.0
    with pytest.raises(pg.DTypeError, match=r"layer 1 is a list; write Sequential\(\*layers\)"):
        nn.Sequential(nn.ReLU(), [nn.ReLU()])


def test_a_module_is_listed_once_and_may_know_its_parent():
    shared = nn.Linear(2, 2)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    shared.parent = model
    assert [name for name, _ in model.named_modules()] == ["", "0", "1"]
    assert list(model.state_dict()) == ["0.weight", "0.bias"]
    assert model.train().training


def test_a_module_without_forward_says_so():
    class Empty(nn.Module):
        pass

    with pytest.raises(NotImplementedError, match="Empty: define forward"):
        Empty()(ag.tensor([1.0]))


def test_a_tensor_cannot_take_the_place_of_a_parameter_unnoticed():
    layer = nn.Linear(2, 2)
    with pytest.raises(pg.DTypeError, match=r"Linear: weight is a parameter, .*weight.assign"):
        layer.weight = layer.weight * 0.5
    other = layer.weight = ag.param(np.ones((2, 2)))
    assert layer.parameters()[0] is other
    layer.bias = None
    assert len(layer.parameters()) == 1


def test_a_buffer_stays_one_when_its_attribute_is_assigned():
    class Count(nn.Module):
        def __init__(self):
            self.total = nn.buffer(np.zeros(2))

    module = Count()
    found = module.total
    for value in (np.array([1.0, 2.0]), ag.tensor([3.0, 4.0]), found * 2.0, ag.param([5.0, 6.0])):
        expected = np.asarray(value)
        module.total = value
        assert module.total is found
        np.testing.assert_array_equal(module.state_dict()["total"], expected)
    assert not found.requires_grad
    with pytest.raises(pg.ShapeError, match=r"the buffer needs the shape \(2,\)"):
        module.total = ag.tensor([1.0])
    assert module.parameters() == []


def test_a_buffer_does_not_change_with_the_tensor_it_was_assigned():
    class Keep(nn.Module):
        def __init__(self):
            self.kept = nn.buffer([0.0])

    module, value = Keep(), ag.tensor([1.0])
    module.kept = value
    value.assign([2.0])
    assert module.kept.item() == 1.0


# ---- modes ---------------------------------------------------------------------------------------


def test_train_and_eval_reach_every_module_and_return_the_model():
    model = nn.Sequential(Block(), nn.checkpoint(nn.Sequential(nn.Dropout(0.5))))
    assert all(module.training for module in model.modules())
    assert model.eval() is model
    assert not any(module.training for module in model.modules())
    assert all(module.training for module in model.train().modules())


def test_frozen_parameters_get_no_gradient_and_stay_as_they_are():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    before = model.state_dict()
    opt = optim.AdamW(model.parameters(), lr=0.1)
    train_once(model, normal(0, 4, 2), opt)
    after = model.state_dict()
    assert model[0].weight.grad is None
    for name in before:
        assert np.array_equal(before[name], after[name]) == name.startswith("0.")
    model.requires_grad_()
    train_once(model, normal(0, 4, 2))
    assert model[0].weight.grad is not None


def test_a_tensor_can_begin_to_need_a_gradient():
    x = ag.tensor([3.0])
    x.requires_grad = True
    with ag.grad_tape():
        loss = ag.sum(x * x)
    assert ag.backward(loss)[x].item() == x.grad.item() == 6.0


def test_apply_calls_inner_modules_first_and_each_once():
    inner = nn.ReLU()
    model = nn.Sequential(inner, nn.Sequential(inner, nn.Tanh()))
    seen = []
    assert model.apply(seen.append) is model
    assert seen == [inner, model[1][1], model[1], model]


# ---- values in and out ---------------------------------------------------------------------------


def test_values_saved_from_one_model_make_another_compute_the_same():
    first, second = Block().eval(), Block().eval()
    x = ag.tensor(normal(0, 5, 2))
    assert not np.array_equal(first(x).numpy(), second(x).numpy())
    left = second.load_state_dict(first.state_dict())
    assert left == ([], [], [])
    np.testing.assert_array_equal(first(x).numpy(), second(x).numpy())


def test_saved_values_are_copies():
    layer = nn.Linear(2, 1)
    values = layer.state_dict()
    layer.weight.assign(np.zeros((1, 2)))
    assert values["weight"].any()


def test_values_that_do_not_fit_are_all_named_and_nothing_is_changed():
    layer = nn.Linear(3, 2)
    before = layer.state_dict()
    wrong = {"weight": np.ones((2, 4)), "scale": 1.0}
    with pytest.raises(pg.ShapeError) as caught:
        layer.load_state_dict(wrong)
    assert str(caught.value) == (
        "Linear.load_state_dict: missing bias; unexpected scale; weight has shape (2, 4), not "
        "(2, 3); strict=False loads what fits"
    )
    with pytest.raises(pg.DTypeError, match="load_state_dict: weight: needs real numbers"):
        layer.load_state_dict({"bias": np.ones(2), "weight": np.full((2, 3), "a")})
    for name, value in layer.state_dict().items():
        np.testing.assert_array_equal(value, before[name])


def test_loading_that_is_not_strict_takes_what_fits_and_returns_the_rest():
    layer = nn.Linear(3, 2)
    left = layer.load_state_dict(
        {"weight": np.ones((2, 4)), "bias": [1.0, 2.0], "scale": 1.0}, strict=False
    )
    assert left.missing == []
    assert left.unexpected == ["scale"]
    assert left.misshaped == ["weight"]
    assert layer.bias.tolist() == [1.0, 2.0]


class Tied(nn.Module):
    """A model that reads its words with the weight by which it also writes them."""

    def __init__(self):
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.embedding(x))


def test_tied_weights_are_one_parameter_saved_once_and_tied_after_loading():
    model = Tied()
    assert len(model.parameters()) == 1
    values = model.state_dict()
    assert list(values) == ["embedding.weight"]
    loaded = Tied()
    loaded.load_state_dict(values)
    assert loaded.head.weight is loaded.embedding.weight
    opt = optim.SGD(loaded.parameters(), lr=1.0)
    before = loaded.head.weight.numpy()
    with ag.grad_tape():
        loss = ag.sum(loaded(np.array([1, 2])))
    grads = ag.backward(loss)
    opt.step()
    after = before - grads[loaded.head.weight].numpy()
    np.testing.assert_allclose(loaded.embedding.weight.numpy(), after, rtol=1e-6, atol=1e-6)


def test_tied_weights_load_under_any_of_their_names_but_not_with_two_values():
    model, value = Tied(), normal(0, 5, 3).astype(np.float32)
    model.load_state_dict({"head.weight": value})
    np.testing.assert_array_equal(model.embedding.weight.numpy(), value)
    model.load_state_dict({"embedding.weight": value + 1, "head.weight": value + 1})
    np.testing.assert_array_equal(model.embedding.weight.numpy(), value + 1)
    with pytest.raises(pg.ShapeError, match="are one parameter here, but their values differ"):
        model.load_state_dict({"embedding.weight": value, "head.weight": value + 1})


def test_a_deep_copy_has_values_of_its_own_and_its_tied_weights_stay_tied():
    model = nn.Sequential(Tied(), nn.BatchNorm1d(5))
    model[0].embedding.weight.requires_grad = False
    with ag.grad_tape():
        out = ag.sum(model(np.array([1, 2, 4])))
    ag.backward(out)
    copied = copy.deepcopy(model)  # while the running statistics are pending
    assert copied[0].head.weight is copied[0].embedding.weight
    assert not copied[0].head.weight.requires_grad
    np.testing.assert_array_equal(copied[1].bias.grad.numpy(), model[1].bias.grad.numpy())
    for name, value in copied.state_dict().items():
        np.testing.assert_array_equal(value, model.state_dict()[name])
    before = model.state_dict()
    copied[0].requires_grad_()
    train_once(copied, np.array([1, 3, 2]), optim.SGD(copied.parameters(), lr=1.0))
    for name, value in model.state_dict().items():
        np.testing.assert_array_equal(value, before[name])
        assert not np.array_equal(value, copied.state_dict()[name])


# ---- what people see -----------------------------------------------------------------------------


def test_repr_shows_the_tree_with_settings():
    model = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)),
        nn.checkpoint(nn.Linear(8, 2)),
        nn.Dropout(0.1),
    )
    assert repr(model) == (
        "Sequential(\n"
        "  (0): Sequential(\n"
        "    (0): Conv2d(3, 8, kernel_size=3, padding=1, bias=False)\n"
        "    (1): BatchNorm2d(num_features=8, eps=1e-05, momentum=0.1)\n"
        "  )\n"
        "  (1): checkpoint(Linear(in_features=8, out_features=2))\n"
        "  (2): Dropout(p=0.1)\n"
        ")"
    )


def test_repr_of_a_module_of_ones_own_shows_its_plain_values():
    assert "note='a plain value'" in repr(Block())
    assert "(rest.1.0): Linear(in_features=3, out_features=3)" in repr(Block())


def test_summary_shows_shapes_and_counts_and_runs_nothing(capsys, device):
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Dropout(0.5), nn.Linear(144, 10)
    )
    model[3].eval()
    model[0].requires_grad_(False)
    state, draws = model.state_dict(), pg.random.default_generator.state()
    device.clear_plans()
    model.summary(np.zeros((32, 1, 8, 8)))
    lines = capsys.readouterr().out.splitlines()
    shapes = ["(32, 4, 6, 6)", "(32, 4, 6, 6)", "(32, 144)", "(32, 144)", "(32, 10)"]
    for i, (line, shape, count) in enumerate(zip(lines[1:], shapes, "40 8 0 0 1,450".split(),
                                                 strict=False)):  # fmt: skip
        name, *_, parameters = line.split()
        assert (name, parameters) == (str(i), count)
        assert shape in line
        assert type(model[i]).__name__ in line
    assert lines[6:] == ["1,498 parameters, 1,458 of them trained; 9 numbers in buffers"]
    assert not device.plans
    assert [layer.training for layer in model] == [True, True, True, False, True]
    assert pg.random.default_generator.state() == draws
    for name, value in model.state_dict().items():
        np.testing.assert_array_equal(value, state[name])


def test_summary_without_inputs_has_no_shapes_and_counts_tied_weights_once(capsys):
    Tied().summary()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["name", "layer", "parameters"]
    assert [line[-1] for line in lines[1:3]] == ["15", "0"]
    assert lines[3][0] == "15"


def test_summary_of_a_model_with_several_inputs_and_outputs(capsys):
    nn.LSTM(3, 8).summary(np.zeros((2, 5, 3)))
    assert "(2, 5, 8), (1, 2, 8), (1, 2, 8)" in capsys.readouterr().out
    nn.TransformerDecoderLayer(8, 2, 16).summary(np.zeros((2, 5, 8)), np.zeros((2, 3, 8)))
    printed = capsys.readouterr().out
    assert "multihead_attn.out_proj" in printed
    assert "(2, 5, 16)" in printed


def test_summary_leaves_modes_and_watching_in_order_after_an_error(capsys):
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 1))
    with pytest.raises(pg.ShapeError):
        model.summary(np.zeros((2, 2)))
    assert model[0].training
    model.summary(np.zeros((2, 3)))
    assert capsys.readouterr().out
