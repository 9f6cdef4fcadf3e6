"""Attention and rotary positions: masks, groups, and what must not depend on what."""

from __future__ import annotations

import numpy as np
import pytest

from pyggml import ag

RNG = np.random.default_rng(6)


def draw(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def attention(q, k, v, allowed=None, scale=None):
    """Return NumPy's attention in float64, for boolean masks that leave each query a key."""
    k, v = (np.repeat(t.astype(float), q.shape[1] // t.shape[1], axis=1) for t in (k, v))
    scores = q.astype(float) @ k.swapaxes(-1, -2) * (scale or q.shape[-1] ** -0.5)
    if allowed is not None:
        scores = np.where(allowed, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True) @ v


# ---- scaled dot product attention ----


@pytest.mark.parametrize("key_heads", [1, 2, 6])
def test_a_key_head_serves_its_neighbouring_query_heads(key_heads, every_device):
    q, k, v = draw(2, 6, 5, 4), draw(2, key_heads, 7, 4), draw(2, key_heads, 7, 3)
    found = ag.scaled_dot_product_attention(q, k, v).numpy()
    np.testing.assert_allclose(found, attention(q, k, v), atol=1e-6)


def test_a_boolean_mask_says_what_may_be_seen_and_a_float_one_is_added(every_device):
    q, k, v = draw(2, 2, 5, 4), draw(2, 2, 6, 4), draw(2, 2, 6, 4)
    allowed = RNG.random((2, 1, 5, 6)) < 0.6
    allowed[..., 0] = True
    right = attention(q, k, v, allowed)
    for mask in (allowed, np.where(allowed, 0.0, -np.inf), np.where(allowed, 0.0, -1e9)):
        found = ag.scaled_dot_product_attention(q, k, v, mask=mask).numpy()
        np.testing.assert_allclose(found, right, atol=1e-6)


@pytest.mark.parametrize("shape", [(6,), (5, 6), (5, 1), (2, 1, 5, 6), (3, 1, 6), (1, 1, 1, 1)])
def test_a_mask_broadcasts(shape, every_device):
    q, k, v, mask = draw(2, 3, 5, 4), draw(2, 3, 6, 4), draw(2, 3, 6, 4), draw(*shape)
    whole = np.broadcast_to(mask, (2, 3, 5, 6))
    found, right = (ag.scaled_dot_product_attention(q, k, v, mask=m).numpy() for m in (mask, whole))
    np.testing.assert_allclose(found, right, atol=1e-6)


def test_a_query_that_may_see_nothing_gives_zeros_and_finite_gradients(every_device):
    q, k, v = (ag.param(draw(1, 1, 3, 4)) for _ in range(3))
    mask = np.array([[True, False, True], [False, False, False], [True, True, True]])
    with ag.grad_tape():
        out = ag.scaled_dot_product_attention(q, k, v, mask=mask)
        loss = ag.sum(out * out)
    grads = ag.grad(loss, [q, k, v])
    assert out.numpy()[0, 0, 1].tolist() == [0.0] * 4
    assert grads[0].numpy()[0, 0, 1].tolist() == [0.0] * 4
    assert all(np.isfinite(g.numpy()).all() and np.abs(g.numpy()).max() > 0 for g in grads)


def test_causal_and_mask_together_may_hide_everything(every_device):
    q = draw(1, 1, 2, 4)
    out = ag.scaled_dot_product_attention(q, q, q, mask=[[False, True]], causal=True).numpy()
    assert out[0, 0, 0].tolist() == [0.0] * 4
    np.testing.assert_allclose(out[0, 0, 1], q[0, 0, 1], rtol=1e-6)


def test_nan_in_a_query_comes_out_of_that_query_only():
    q, k, v = draw(1, 1, 3, 4), draw(1, 1, 3, 4), draw(1, 1, 3, 4)
    q[0, 0, 1, 0] = np.nan
    for mask in (None, np.zeros((3, 3)), np.full((3, 3), -np.inf)):
        out = ag.scaled_dot_product_attention(q, k, v, mask=mask).numpy()[0, 0]
        assert np.isnan(out[1]).all()
        assert np.isfinite(out[[0, 2]]).all()


@pytest.mark.parametrize("keys", [5, 9])
def test_causal_queries_are_the_last_tokens_and_see_none_behind_their_own(keys, every_device):
    q, k, v = draw(2, 2, 5, 4), draw(2, 1, keys, 4), draw(2, 1, keys, 4)
    allowed = np.tri(5, keys, keys - 5, dtype=bool)
    found = ag.scaled_dot_product_attention(q, k, v, causal=True).numpy()
    np.testing.assert_allclose(found, attention(q, k, v, allowed), atol=1e-6)


def test_one_query_after_cached_keys_is_the_last_row_of_the_whole():
    q, k, v = draw(1, 2, 8, 4), draw(1, 2, 8, 4), draw(1, 2, 8, 4)
    whole = ag.scaled_dot_product_attention(q, k, v, causal=True).numpy()
    last = ag.scaled_dot_product_attention(q[:, :, -1:], k, v, causal=True).numpy()
    np.testing.assert_allclose(last, whole[:, :, -1:], rtol=1e-5, atol=1e-6)


def test_a_later_token_changes_no_earlier_output_and_gets_no_gradient_from_it():
    q, k, v = draw(1, 1, 6, 4), draw(1, 1, 6, 4), draw(1, 1, 6, 4)
    before = ag.scaled_dot_product_attention(q, k, v, causal=True).numpy()
    k[0, 0, 4:], v[0, 0, 4:] = 50.0, np.float32(-7.0)
    keys, values = ag.param(k), ag.param(v)
    with ag.grad_tape():
        out = ag.scaled_dot_product_attention(q, keys, values, causal=True)
    seed = np.zeros((1, 1, 6, 4), np.float32)
    seed[:, :, :4] = 1.0
    for gradient in ag.grad(out, [keys, values], seed=ag.tensor(seed)):
        assert (gradient.numpy()[0, 0, 4:] == 0.0).all()
    assert (out.numpy()[0, 0, :4] == before[0, 0, :4]).all()


def test_the_scale_is_one_over_the_root_of_the_width_unless_given():
    q, k, v = draw(1, 1, 3, 16), draw(1, 1, 3, 16), draw(1, 1, 3, 16)
    default = ag.scaled_dot_product_attention(q, k, v).numpy()
    assert (default == ag.scaled_dot_product_attention(q, k, v, scale=0.25).numpy()).all()
    found = ag.scaled_dot_product_attention(q, k, v, scale=2.0).numpy()
    np.testing.assert_allclose(found, attention(q, k, v, scale=2.0), atol=1e-5)


# ---- rope ----


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_product_of_two_turned_vectors_depends_on_their_distance_only(interleaved):
    x, y = draw(8), draw(8)
    products = []
    for start in (0, 3, 1000):
        pair = np.stack([x, y])[:, None]  # (tokens, heads, width)
        a, b = ag.rope(pair, positions=[start, start + 5], interleaved=interleaved).numpy()[:, 0]
        products.append(a @ b)
    np.testing.assert_allclose(products, products[0], rtol=1e-5)


def test_position_zero_changes_nothing_and_lengths_stay(every_device):
    x = draw(2, 4, 3, 6)
    y = ag.rope(x).numpy()
    np.testing.assert_allclose(y[:, 0], x[:, 0], rtol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(y, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-6)


def test_positions_default_to_counting_from_zero(every_device):
    x = draw(3, 2, 4)
    assert (ag.rope(x).numpy() == ag.rope(x, positions=[0, 1, 2]).numpy()).all()


@pytest.mark.parametrize("position", [5, -5, 4096, 1_000_000, 2**31 - 1])
def test_angles_are_exact_at_far_positions(position):
    x = draw(1, 1, 64)
    angle = position * 10000.0 ** (-np.arange(0, 64, 2) / 64)
    turned = (x[0, 0, :32] + 1j * x[0, 0, 32:]) * np.exp(1j * angle)
    y = ag.rope(x, positions=[position]).numpy()[0, 0]
    np.testing.assert_allclose(y, np.concatenate([turned.real, turned.imag]), atol=2e-6)


def test_the_gradient_turns_back(every_device):
    x = ag.param(draw(2, 3, 2, 4))
    with ag.grad_tape():
        y = ag.rope(x)
    back = ag.grad(y, x, seed=y.detach())
    np.testing.assert_allclose(back.numpy(), x.numpy(), atol=1e-6)


def test_a_width_beyond_the_kernels_block_of_pairs():
    x = draw(2, 1, 2 * 1030)
    angle = np.outer([0, 1], 10000.0 ** (-np.arange(0, 2060, 2) / 2060))[:, None]
    turned = (x[..., ::2] + 1j * x[..., 1::2]) * np.exp(1j * angle)
    y = ag.rope(x, interleaved=True).numpy()
    np.testing.assert_allclose(y[..., ::2], turned.real, atol=2e-6)
    np.testing.assert_allclose(y[..., 1::2], turned.imag, atol=2e-6)
