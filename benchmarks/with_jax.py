"""The workloads in JAX: one jitted function a step, with donated buffers and optax's AdamW."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from jax import lax
from jax import numpy as jnp
from workloads import LEARNING_RATE, WEIGHT_DECAY, Cnn, Gpt, Lstm, Mlp, Net, Weights

VERSION = jax.__version__

Arrays = dict[str, Any]


def set_threads(threads: int) -> None:
    """Let XLA use so many threads: in effect only before the first computation."""
    os.environ["NPROC"] = str(threads)


def _linear(w: Arrays, name: str, x: Any) -> Any:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def _mlp(net: Mlp, w: Arrays, x: Any, training: bool) -> tuple[Any, Arrays]:
    last = len(net.sizes) - 2
    for i in range(last):
        x = jax.nn.relu(_linear(w, str(2 * i), x))
    return _linear(w, str(2 * last), x), {}


def _layer_norm(w: Arrays, name: str, x: Any) -> Any:
    x = x - x.mean(-1, keepdims=True)
    scale = lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)
    return x * scale * w[f"{name}.weight"] + w[f"{name}.bias"]


def _gpt(net: Gpt, w: Arrays, x: Any, training: bool) -> tuple[Any, Arrays]:
    batch, tokens = x.shape
    h = w["token.weight"][x] + w["place.weight"][:tokens]
    for i in range(net.layers):
        attn = f"layers.{i}.self_attn"
        qkv = _layer_norm(w, f"layers.{i}.norm1", h) @ w[f"{attn}.in_proj_weight"].T
        qkv = (qkv + w[f"{attn}.in_proj_bias"]).reshape(batch, tokens, 3, net.heads, -1)
        q, k, v = (qkv[:, :, part] for part in range(3))  # (B, T, heads, width / heads)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        h = h + _linear(w, f"{attn}.out_proj", mixed.reshape(h.shape))
        inner = _linear(w, f"layers.{i}.linear1", _layer_norm(w, f"layers.{i}.norm2", h))
        h = h + _linear(w, f"layers.{i}.linear2", jax.nn.gelu(inner, approximate=False))
    return _linear(w, "head", _layer_norm(w, "norm", h)), {}


def _cnn(net: Cnn, w: Arrays, x: Any, training: bool) -> tuple[Any, Arrays]:
    x = x.transpose(0, 2, 3, 1)  # XLA's CPU kernels want the channels last
    buffers: Arrays = {}
    for conv in (0, 4):
        norm = str(conv + 1)
        kernel = w[f"{conv}.weight"].transpose(2, 3, 1, 0)
        x = lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = x + w[f"{conv}.bias"]
        mean, var = w[f"{norm}.running_mean"], w[f"{norm}.running_var"]
        if training:
            count = x.size // x.shape[-1]
            batch_mean, batch_var = x.mean((0, 1, 2)), x.var((0, 1, 2))
            unbiased = batch_var * (count / (count - 1))
            buffers[f"{norm}.running_mean"] = 0.9 * mean + 0.1 * batch_mean
            buffers[f"{norm}.running_var"] = 0.9 * var + 0.1 * unbiased
            mean, var = batch_mean, batch_var
        x = (x - mean) * (lax.rsqrt(var + 1e-5) * w[f"{norm}.weight"]) + w[f"{norm}.bias"]
        x = jax.nn.relu(x)
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    x = x.transpose(0, 3, 1, 2).reshape(x.shape[0], -1)  # flat in PyTorch's order
    return _linear(w, "11", jax.nn.relu(_linear(w, "9", x))), buffers


def _lstm(net: Lstm, w: Arrays, x: Any, training: bool) -> tuple[Any, Arrays]:
    bias = w["lstm.bias_ih_l0"] + w["lstm.bias_hh_l0"]
    inputs = x.transpose(1, 0, 2) @ w["lstm.weight_ih_l0"].T + bias  # (steps, B, 4 hidden)
    recurrent = w["lstm.weight_hh_l0"].T

    def step(state: Any, gates: Any) -> Any:
        h, c = state
        i, f, g, o = jnp.split(gates + h @ recurrent, 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

    zeros = jnp.zeros((x.shape[0], net.hidden))
    (h, _), _ = lax.scan(step, (zeros, zeros), inputs)
    return _linear(w, "head", h), {}


NETS: dict[type, Any] = {Mlp: _mlp, Gpt: _gpt, Cnn: _cnn, Lstm: _lstm}


class JaxEngine:
    """A network in JAX, for training or for inference."""

    nets = tuple(NETS)

    def __init__(self, net: Net, weights: Weights, *, training: bool = True) -> None:
        forward = partial(NETS[type(net)], net)
        opt = optax.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY)
        arrays = {name: jnp.array(w) for name, w in weights.items()}
        kept = {name for name in arrays if "running" in name or "num_batches" in name}
        self.buffers = {name: arrays[name] for name in kept}
        self.params = {name: w for name, w in arrays.items() if name not in kept}
        self.state = opt.init(self.params)

        def loss_of(params: Arrays, buffers: Arrays, x: Any, labels: Any) -> Any:
            logits, new = forward(params | buffers, x, True)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return losses.mean(), buffers | new

        @partial(jax.jit, donate_argnums=(0, 1, 2))
        def update(params: Arrays, buffers: Arrays, state: Any, x: Any, labels: Any) -> Any:
            value = jax.value_and_grad(loss_of, has_aux=True)
            (loss, buffers), grads = value(params, buffers, x, labels)
            updates, state = opt.update(grads, state, params)
            return loss, optax.apply_updates(params, updates), buffers, state

        self.update = update
        self.forward = jax.jit(lambda w, x: forward(w, x, False)[0])
        self.weights = arrays

    def step(self, x: np.ndarray, labels: np.ndarray) -> float:
        """Train on one batch and return its loss."""
        loss, self.params, self.buffers, self.state = self.update(
            self.params, self.buffers, self.state, x, labels
        )
        return float(loss)

    def run(self, x: np.ndarray) -> np.ndarray:
        """Return the logits of one batch."""
        return np.asarray(self.forward(self.weights, x))
