"""Trade time for memory: recompute parts of the forward pass in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from .autograd import _set_mode
from .checks import need_function
from .graph import state
from .random import default_generator

Result = TypeVar("Result")


def checkpoint(fn: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """Call fn and return its result, whose inner values the backward pass computes again.

    They are not kept in the meantime. ``fn`` is called once, here. What it records is marked as one
    segment: values that leave the segment are kept, those inside are freed after their last use in
    the forward pass and computed again just before the backward pass needs them, from the same
    inputs and with the same random masks, so gradients are equal to the last bit on the CPU.
    Arguments and results may be anything; weights reached through closures get their gradients;
    segments nest. Without a tape this is a plain call.

    >>> w = ag.param([2.0])
    >>> with ag.grad_tape():
    ...     loss = ag.sum(ag.checkpoint(lambda x: ag.relu(x * w) * w, w))
    >>> ag.backward(loss)[w].numpy()
    array([12.], dtype=float32)
    """
    need_function("checkpoint", "fn", fn)
    if not state.mode.taped:
        return fn(*args, **kwargs)
    outer, drawn = state.segment, default_generator.state()
    state.segments += 1
    state.segment = (*outer, state.segments)
    _set_mode()
    try:
        return fn(*args, **kwargs)
    except BaseException:
        default_generator.set_state(drawn)  # as if the segment had not begun
        raise
    finally:
        state.segment = outer
        _set_mode()
