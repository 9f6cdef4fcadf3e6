"""Attention with learned projections, and the two layers that transformers are stacked from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import ops
from ..checks import fraction, positive_integer, shown
from ..errors import SettingError
from ..ops import add, linear, permute, reshape, scaled_dot_product_attention
from ..tensor import Parameter, Tensor, TensorLike
from . import init
from ._layers import Dropout, Linear
from ._module import Module
from ._norms import LayerNorm
from ._support import input_of, misfit, parameter


class MultiheadAttention(Module):
    """Attend from queries to keys and values: (B, T, embed_dim).

    The queries are (B, T, embed_dim), the keys (B, S, kdim), the values (B, S, vdim). Each of
    num_heads heads attends with its own projection (Vaswani et al. 2017). With fewer num_kv_heads,
    neighbouring heads share keys and values (Ainslie et al. 2023). In training, attention weights
    are dropped with probability ``dropout``. The batch is always the first axis, and only the
    attended values are returned.

    Parameters: in_proj_weight, the rows of queries, keys and values one below the other, or
    q_proj_weight, k_proj_weight and v_proj_weight where kdim or vdim differ from embed_dim;
    in_proj_bias; out_proj. Weights start as init.xavier_uniform, biases as zeros. Raises
    SettingError if num_heads does not divide embed_dim, or num_kv_heads num_heads.

    >>> layer = nn.MultiheadAttention(8, 2)
    >>> x = ag.tensor(np.ones((3, 5, 8)))
    >>> layer(x, causal=True).shape  # self-attention
    (3, 5, 8)
    >>> layer(x, ag.tensor(np.ones((3, 7, 8)))).shape  # cross-attention
    (3, 5, 8)
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        dropout: float = 0.0,
        bias: bool = True,
        num_kv_heads: int | None = None,
        kdim: int | None = None,
        vdim: int | None = None,
    ) -> None:
        name = "MultiheadAttention"
        self.embed_dim = positive_integer(name, "embed_dim", embed_dim)
        self.num_heads = positive_integer(name, "num_heads", num_heads)
        wanted = num_heads if num_kv_heads is None else num_kv_heads
        self.num_kv_heads = positive_integer(name, "num_kv_heads", wanted)
        self.kdim = positive_integer(name, "kdim", embed_dim if kdim is None else kdim)
        self.vdim = positive_integer(name, "vdim", embed_dim if vdim is None else vdim)
        self.dropout = fraction(name, "dropout", dropout)
        if self.embed_dim % self.num_heads:
            raise SettingError(
                f"{name}: num_heads must divide embed_dim; got {num_heads}, {embed_dim}"
            )
        if self.num_heads % self.num_kv_heads:
            raise SettingError(
                f"{name}: num_kv_heads must divide num_heads; got {num_kv_heads}, {num_heads}"
            )
        width = self.embed_dim // self.num_heads * self.num_kv_heads  # of keys, and of values
        self._rows = (self.embed_dim, width, width)
        self.in_proj_weight: Parameter | None = None
        self.q_proj_weight: Parameter | None = None
        self.k_proj_weight: Parameter | None = None
        self.v_proj_weight: Parameter | None = None
        if self.kdim == self.vdim == self.embed_dim:
            self.in_proj_weight = parameter(init.xavier_uniform((sum(self._rows), self.embed_dim)))
        else:
            self.q_proj_weight = parameter(init.xavier_uniform((self.embed_dim, self.embed_dim)))
            self.k_proj_weight = parameter(init.xavier_uniform((width, self.kdim)))
            self.v_proj_weight = parameter(init.xavier_uniform((width, self.vdim)))
        self.in_proj_bias = parameter(init.zeros((sum(self._rows),))) if bias else None
        self.out_proj = Linear(self.embed_dim, self.embed_dim, bias=bias)
        if self.out_proj.bias is not None:
            self.out_proj.bias.assign(init.zeros((self.embed_dim,)))

    def forward(
        self,
        query: TensorLike,
        key: TensorLike | None = None,
        value: TensorLike | None = None,
        *,
        mask: TensorLike | None = None,
        causal: bool = False,
    ) -> Tensor:
        """Attend. Keys are by default the queries, and values the keys.

        mask and causal are those of ag.scaled_dot_product_attention: a boolean mask, True for what
        may be seen, of a shape that broadcasts to (B, num_heads, T, S); keys that are padding are
        masked by one of shape (B, 1, 1, S).
        """
        q = input_of(self, query, self.out_proj.weight)
        k = q if key is None else input_of(self, key, q)
        v = k if value is None else input_of(self, value, q)
        self._check(q, k, v)
        heads = []
        parts = zip((q, k, v), self._weights(), self._biases(), strict=True)
        for x, weight, bias in parts:
            projected = linear(x, weight, bias)
            width = self.embed_dim // self.num_heads
            split = reshape(projected, (*projected.shape[:2], -1, width))  # (B, T, heads, width)
            heads.append(permute(split, (0, 2, 1, 3)))
        attended = scaled_dot_product_attention(
            *heads, mask=mask, causal=causal, dropout_p=self.dropout if self.training else 0.0
        )
        return self.out_proj(reshape(permute(attended, (0, 2, 1, 3)), q.shape))

    def _weights(self) -> tuple[Tensor, ...]:
        if self.in_proj_weight is not None:
            return ops.split(self.in_proj_weight, self._rows)
        separate = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        return tuple(weight for weight in separate if weight is not None)

    def _biases(self) -> tuple[Tensor | None, ...]:
        if self.in_proj_bias is None:
            return None, None, None
        return ops.split(self.in_proj_bias, self._rows)

    def _check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        expected = (
            f"queries (batch, tokens, {self.embed_dim}), keys (batch, others, {self.kdim}) and "
            f"values (batch, others, {self.vdim})"
        )
        widths = (self.embed_dim, self.kdim, self.vdim)
        if any(x.ndim != 3 or x.shape[2] != n for x, n in zip((q, k, v), widths, strict=True)):
            raise misfit(self, expected, q, k, v)
        if q.shape[0] != k.shape[0] or k.shape[:2] != v.shape[:2]:
            raise misfit(self, expected, q, k, v)

    def extra_repr(self) -> str:
        said = f"embed_dim={self.embed_dim}, num_heads={self.num_heads}"
        if self.num_kv_heads != self.num_heads:
            said += f", num_kv_heads={self.num_kv_heads}"
        if self.in_proj_weight is None:
            said += f", kdim={self.kdim}, vdim={self.vdim}"
        said += f", dropout={self.dropout}" if self.dropout else ""
        return said + ("" if self.in_proj_bias is not None else ", bias=False")


class _TransformerLayer(Module):
    """What both layers share: the settings, and the feed-forward part."""

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        *,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = "relu",
        layer_norm_eps: float = 1e-5,
        norm_first: bool = False,
        bias: bool = True,
    ) -> None:
        name = type(self).__name__
        d_model = positive_integer(name, "d_model", d_model)
        dim_feedforward = positive_integer(name, "dim_feedforward", dim_feedforward)
        dropout = fraction(name, "dropout", dropout)
        if not callable(activation) and str(activation) not in ("relu", "gelu"):
            raise SettingError(
                f"{name}: activation must be 'relu', 'gelu' or a function; got {shown(activation)}"
            )
        self.norm_first = bool(norm_first)
        self.activation = activation
        self.self_attn = MultiheadAttention(d_model, nhead, dropout=dropout, bias=bias)
        self._add_attention(d_model, nhead, dropout, bias)
        self.linear1 = Linear(d_model, dim_feedforward, bias=bias)
        self.dropout = Dropout(dropout)
        self.linear2 = Linear(dim_feedforward, d_model, bias=bias)
        for i in range(1, self._sublayers + 1):
            setattr(self, f"norm{i}", LayerNorm(d_model, eps=layer_norm_eps, bias=bias))
            setattr(self, f"dropout{i}", Dropout(dropout))

    _sublayers = 2

    def _add_attention(self, d_model: int, nhead: int, dropout: float, bias: bool) -> None:
        pass

    def _sublayer(self, i: int, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Return x plus what sublayer i makes of it, normalised before or afterwards."""
        norm, dropped = getattr(self, f"norm{i}"), getattr(self, f"dropout{i}")
        if self.norm_first:
            return add(x, dropped(function(norm(x))))
        return norm(add(x, dropped(function(x))))

    def _feed_forward(self, x: Tensor) -> Tensor:
        act: Any = self.activation
        act = getattr(ops, act) if isinstance(act, str) else act
        return self.linear2(self.dropout(act(self.linear1(x))))


class TransformerEncoderLayer(_TransformerLayer):
    """Self-attention, then two linear layers: (B, T, d_model) -> (B, T, d_model).

    Each part is added to its input and normalised. dim_feedforward is the width between the linear
    layers. ``norm_first`` normalises what goes into each part instead of its sum, which trains more
    easily when many layers are stacked (Xiong et al. 2020). ``activation`` is "relu", "gelu" or a
    function. Made causal by causal=True, it is a GPT's layer. The batch is always the first axis
    (Vaswani et al. 2017).

    >>> layer = nn.TransformerEncoderLayer(8, 2, 16, norm_first=True)
    >>> layer(ag.tensor(np.ones((3, 5, 8))), causal=True).shape
    (3, 5, 8)
    """

    def forward(
        self, x: TensorLike, *, mask: TensorLike | None = None, causal: bool = False
    ) -> Tensor:
        """Return the layer's output; mask and causal are those of MultiheadAttention."""
        x = input_of(self, x, self.linear1.weight)
        x = self._sublayer(1, x, lambda x: self.self_attn(x, mask=mask, causal=causal))
        return self._sublayer(2, x, self._feed_forward)


class TransformerDecoderLayer(_TransformerLayer):
    """Self-attention, attention to a memory, then two linear layers: (B, T, d_model).

    It takes (B, T, d_model) and the memory, (B, S, d_model). Each part is added to its input and
    normalised; the settings are those of TransformerEncoderLayer (Vaswani et al. 2017).

    >>> layer = nn.TransformerDecoderLayer(8, 2, 16)
    >>> memory = ag.tensor(np.ones((3, 7, 8)))
    >>> layer(ag.tensor(np.ones((3, 5, 8))), memory, causal=True).shape
    (3, 5, 8)
    """

    _sublayers = 3

    def _add_attention(self, d_model: int, nhead: int, dropout: float, bias: bool) -> None:
        self.multihead_attn = MultiheadAttention(d_model, nhead, dropout=dropout, bias=bias)

    def forward(
        self,
        x: TensorLike,
        memory: TensorLike,
        *,
        mask: TensorLike | None = None,
        causal: bool = False,
        memory_mask: TensorLike | None = None,
    ) -> Tensor:
        """Return the layer's output.

        mask and causal belong to the self-attention, memory_mask to the attention to the memory.
        """
        x = input_of(self, x, self.linear1.weight)
        memory = input_of(self, memory, x)
        x = self._sublayer(1, x, lambda x: self.self_attn(x, mask=mask, causal=causal))
        x = self._sublayer(2, x, lambda x: self.multihead_attn(x, memory, mask=memory_mask))
        return self._sublayer(3, x, self._feed_forward)
