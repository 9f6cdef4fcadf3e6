"""Gradients: one reverse walk over the recorded nodes, with each op's own rule.

The rules are written in ops, so the result is recorded too. Reverse-mode accumulation (Linnainmaa
1970). The walk happens once for a structure; a step that repeats it finds the gradient nodes by the
identity of the loss node.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

from . import graph
from .checks import as_list, need_function, positive_integer, shown
from .errors import DTypeError, GradError, SettingError, ShapeError
from .graph import Budget, Frame, Mode, Node, find_node, mode_of, source_index, state
from .ops import add, sum_to
from .ops.elementwise import filled
from .ops.slicing import join_tiles, place_of_tile
from .ops.update import ACCUMULATE
from .plan import graph_order
from .tensor import Tensor, make_tensor, node_in, passing, pending

# ---- recording modes -----------------------------------------------------------------------------


class _Recording:
    """A with block that sets whether ops are taped.

    Blocks may end in any order, as those of paused generators do.
    """

    _taped: bool

    def __init__(self) -> None:
        self._entries: list[tuple[object, bool]] = []

    def __enter__(self) -> _Recording:
        entry = (object(), self._taped)
        self._entries.append(entry)
        state.blocks.append(entry)
        _set_mode()
        return self

    def __exit__(self, *error: object) -> None:
        state.blocks.remove(self._entries.pop())
        _set_mode()

    def _copy(self) -> _Recording:
        return type(self)()

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function, or each step of a generator function, in the block."""
        need_function(type(self).__name__, "what it decorates", function)
        if inspect.isgeneratorfunction(function):

            @functools.wraps(function)
            def generator(*args: Any, **kwargs: Any) -> Any:
                iterator = function(*args, **kwargs)
                value, step = None, iterator.send
                while True:
                    with self._copy():
                        try:
                            yielded = step(value)
                        except StopIteration as stop:
                            return stop.value
                    try:
                        value, step = (yield yielded), iterator.send
                    except GeneratorExit:
                        iterator.close()
                        raise
                    except BaseException as exception:
                        # thrown into us: throw it into the wrapped generator
                        value, step = exception, iterator.throw

            return generator

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with self._copy():
                return function(*args, **kwargs)

        return wrapped


def _set_mode() -> None:
    state.mode = mode_of(bool(state.blocks) and state.blocks[-1][1], state.segment)


class grad_tape(_Recording):
    """Record the ops inside, so that ag.backward can follow them; a with block or a decorator.

    Blocks nest. ``memory_budget``, in bytes, bounds the planned working memory of the step (the
    values between inputs and outputs; plan_report calls them activations): what does not fit is
    recomputed in the backward pass. "sqrt" cuts the forward pass in as many segments as the root of
    its length. Results stay equal to the last bit.

    >>> w = ag.param([2.0])
    >>> with ag.grad_tape():
    ...     loss = ag.sum(w * w)
    >>> ag.backward(loss)[w].numpy()
    array([4.], dtype=float32)
    """

    _taped = True

    def __init__(self, *, memory_budget: Budget | None = None) -> None:
        super().__init__()
        if memory_budget is not None and not (
            isinstance(memory_budget, str) and memory_budget == "sqrt"
        ):
            memory_budget = positive_integer("grad_tape", "memory_budget", memory_budget)
        self._memory_budget = memory_budget

    def _copy(self) -> _Recording:
        return grad_tape(memory_budget=self._memory_budget)

    def __enter__(self) -> _Recording:
        if not any(taped for _, taped in state.blocks):
            # Number sources from 0 again, so that a step like the last one has equal nodes; but
            # what is pending from just before the tape, such as a batch being scaled, is to run in
            # one graph with it.
            for device, frame in list(state.frames.items()):
                if frame.tape_closed or not frame.is_pending():
                    state.new_frame(device)
            state.segments = 0
            state.memory_budget = self._memory_budget
            for frame in state.frames.values():
                frame.memory_budget = self._memory_budget
        elif self._memory_budget is not None:
            raise SettingError("grad_tape: memory_budget belongs to the outermost tape")
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if not any(taped for _, taped in state.blocks):
            state.memory_budget = None
            for frame in state.frames.values():
                frame.tape_closed = True


class no_grad(_Recording):
    """Compute inside without recording for gradients. Usable as a with block or a decorator.

    >>> w = ag.param([2.0])
    >>> with ag.grad_tape(), ag.no_grad():
    ...     print((w * w).requires_grad)
    False
    """

    _taped = False


def is_recording() -> bool:
    """Return whether ops are being taped in this thread.

    >>> with ag.grad_tape():
    ...     ag.is_recording()
    True
    """
    return state.mode.taped


# ---- the reverse walk ----------------------------------------------------------------------------

_gradients = graph.DerivedCache()  # (target, seed, wanted nodes, mode) -> gradient nodes
_leaves = graph.DerivedCache()  # target -> the leaves that collect gradients


def _gradient_nodes(
    target: Node, seed: Node, wanted: tuple[Node, ...], frame: Frame
) -> tuple[Node | None, ...]:
    """Return the nodes of the target's gradients in each wanted node.

    None stands for a node that the target does not depend on.
    """
    key = (target, seed, wanted, state.mode)
    found = _gradients.get(key)
    if found is None or frame.lines is not None:  # the walk says which rule made which node
        count = len(frame.sources)
        found = _walk(target, seed, wanted, frame)
        if len(frame.sources) == count:  # a source that a rule made has another number next time
            _gradients[key] = found
    return found


def _walk(
    target: Node, seed: Node, wanted: tuple[Node, ...], frame: Frame
) -> tuple[Node | None, ...]:
    order = graph_order([target])
    kept = set(wanted)
    between = set(kept)  # the nodes on a path from a wanted one to the target
    for node in order:
        if node.requires_grad and any(parent in between for parent in node.inputs):
            between.add(node)
    totals: dict[Node, Tensor] = {target: passing(seed, frame)}
    tiles: dict[Node, list[Tensor]] = {}  # these wait for others to be joined with

    def total_of(node: Node) -> Tensor | None:
        for part in join_tiles(tiles.pop(node, [])):
            totals[node] = add(totals[node], part) if node in totals else part
        return totals.get(node)

    for node in reversed(order):
        if not any(parent in between for parent in node.inputs):
            continue
        total = total_of(node)
        if total is None:
            continue
        for parent, part in zip(node.inputs, _apply_rule(node, total, frame), strict=True):
            if part is None or parent not in between:
                continue
            if part.shape != parent.shape:
                part = sum_to(part, parent.shape)
            if place_of_tile(part) is not None:
                tiles.setdefault(parent, []).append(part)
            else:  # at once, so that a run need not hold all parts of a shared weight's gradient
                totals[parent] = add(totals[parent], part) if parent in totals else part
        if node not in kept:
            del totals[node]
    return tuple(None if (g := total_of(node)) is None else g._at[1] for node in wanted)


def _apply_rule(node: Node, g: Tensor, frame: Frame) -> tuple[Tensor | None, ...]:
    rule = node.op.grad
    if rule is None:
        raise GradError(
            f"{node.op.name}: no gradient rule is written for this op; use its result, or detach it"
        )
    inputs = (passing(parent, frame) for parent in node.inputs)
    frame.rule_of = node
    try:
        parts = rule(g, passing(node, frame), *inputs, **dict(node.settings))
    finally:
        frame.rule_of = None
    return parts if isinstance(parts, tuple) else (parts,)


def _gradients_of(
    op: str,
    target: Tensor,
    wanted: Callable[[Frame, Node], tuple[Node, ...]],
    seed: Tensor | None,
    mode: Mode,
) -> tuple[Frame, tuple[Node, ...], tuple[Node | None, ...]]:
    """Return the target's frame, the nodes asked for there, and the gradient node of each."""
    if not isinstance(target, Tensor):
        raise DTypeError(f"{op}: needs a Tensor; got {shown(target)}")
    frame, node = target._at
    if frame.ended and node.requires_grad and not target.is_leaf:
        raise GradError(f"{op}: the tape of this value is gone, {frame.ended}; record it again")
    if not node.requires_grad:
        raise GradError(
            f"{op}: this value does not depend on a parameter on a tape; compute it from an "
            "ag.param inside `with ag.grad_tape():`"
        )
    if frame.ended:  # a leaf, differentiated with respect to itself
        frame = state.open_frame(target.device)
        node = node_in(target, frame)
    frame.check_current()
    if seed is None and target.size != 1:
        raise ShapeError(
            f"{op}: needs a value of one element; got shape {target.shape}; reduce it with ag.sum "
            "or ag.mean, or give the gradient to start from as seed="
        )
    if seed is not None and not isinstance(seed, Tensor):
        seed = make_tensor(seed, device=frame.device, op=f"{op}: seed")
    if seed is not None and seed.shape != target.shape:
        raise ShapeError(f"{op}: seed must have the value's shape {target.shape}; got {seed.shape}")
    with state.inside(frame, mode):
        start = filled(node.shape, 1.0) if seed is None else node_in(seed, frame)
        nodes = wanted(frame, node)
        return frame, nodes, _gradient_nodes(node, start, nodes, frame)


# ---- what people call ----------------------------------------------------------------------------


def grad(
    target: Tensor,
    wrt: Tensor | Sequence[Tensor],
    *,
    seed: Tensor | None = None,
    allow_unused: bool = False,
) -> Any:
    """Return the gradient of a value with respect to tensors.

    The tensors are leaves or anything recorded on the way. ``target`` has one element, or ``seed``
    gives the gradient to start from. Inside a grad_tape the gradients are recorded themselves, so
    they can be differentiated again. Nothing is added to ``.grad``. Raises GradError for a tensor
    that the target does not depend on, unless allow_unused, which gives None for it.

    >>> x = ag.param(3.0)
    >>> with ag.grad_tape():
    ...     first = ag.grad(x * x * x, x)
    ...     second = ag.grad(first, x)
    >>> first.item(), second.item()
    (27.0, 18.0)
    """
    tensors = (wrt,) if isinstance(wrt, Tensor) else tuple(as_list("grad", "wrt", wrt, "tensors"))
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise DTypeError(f"grad: wrt must be a list of tensors; got {shown(tensor)} in it")
        if not tensor.requires_grad:
            raise GradError(
                f"grad: the tensor of shape {tensor.shape} was not recorded for gradients; make it "
                "with ag.param or requires_grad=True, and compute from it inside ag.grad_tape()"
            )
    frame, _, found = _gradients_of(
        "grad",
        target,
        lambda frame, _: tuple(node_in(tensor, frame) for tensor in tensors),
        seed,
        mode_of(state.mode.taped, state.segment, backward=True),
    )
    for tensor, node in zip(tensors, found, strict=True):
        if node is None and not allow_unused:
            raise GradError(
                f"grad: the value does not depend on the tensor of shape {tensor.shape}; pass "
                "allow_unused=True for None"
            )
    results = [None if node is None else pending(node, frame) for node in found]
    return results[0] if isinstance(wrt, Tensor) else results


_BACKWARD = mode_of(False, backward=True)


def _leaves_of(frame: Frame, target: Node) -> tuple[Node, ...]:
    leaves = _leaves.get(target)
    if leaves is None:
        leaves = _leaves[target] = tuple(
            node for node in graph_order([target]) if node.op is graph.SOURCE and node.requires_grad
        )
    return leaves


def leaf_gradients(
    op: str, target: Tensor, seed: Tensor | None = None
) -> tuple[Frame, list[tuple[Tensor, Node]]]:
    """Return the target's frame, and each leaf it depends on with the node of its gradient."""
    frame, leaves, found = _gradients_of(op, target, _leaves_of, seed, _BACKWARD)
    pairs = []
    for leaf, node in zip(leaves, found, strict=True):
        owner = frame.sources[source_index(leaf)].owner
        tensor = owner() if owner is not None else None
        if tensor is not None and node is not None:
            pairs.append((tensor, node))
    return frame, pairs


def backward(target: Tensor, *, seed: Tensor | None = None) -> dict[Tensor, Tensor]:
    """Add the gradients of a value to ``.grad`` of every leaf it depends on.

    Returns this call's gradients by leaf. ``target`` has one element, or ``seed`` gives the
    gradient to start from. Raises GradError if the value was not recorded on a tape, or if its
    parameters have been updated since.

    >>> w = ag.param([1.0, 2.0])
    >>> with ag.grad_tape():
    ...     loss = ag.sum(w * w)
    >>> grads = ag.backward(loss)
    >>> grads[w].numpy(), w.grad.numpy()
    (array([2., 4.], dtype=float32), array([2., 4.], dtype=float32))
    """
    frame, pairs = leaf_gradients("backward", target, seed)
    # A gradient that still waits for an earlier backward is computed first: k micro-batches are k
    # equal runs, and the memory of one, not one run k times as long.
    for tensor, _ in pairs:
        if tensor.grad is not None and tensor.grad._source is None:
            tensor.grad._materialized()
    grads: dict[Tensor, Tensor] = {}
    with state.inside(frame, _BACKWARD):
        for tensor, node in pairs:
            part = grads[tensor] = pending(node, frame)
            if tensor.grad is None:
                tensor.grad = part
            elif frame.lines is None and _nobody_else_holds(tensor):
                _add_in_place(tensor.grad, node, frame)
            else:
                tensor.grad = add(tensor.grad, part)
    return grads


def _nobody_else_holds(tensor: Tensor) -> bool:
    """Tell whether a leaf's gradient is held by its .grad alone, so that it may grow in place.

    Whoever keeps what an earlier ag.backward returned keeps its value.
    """
    assert tensor.grad is not None
    # Each count includes the reference that is getrefcount's own argument.
    return sys.getrefcount(tensor.grad) <= 2 and sys.getrefcount(tensor.grad._source) <= 2


def _add_in_place(gradient: Tensor, part: Node, frame: Frame) -> None:
    source = gradient._source
    assert source is not None
    key = (ACCUMULATE, (), _BACKWARD, frame.bind(source), part)
    gradient._become(pending(find_node(key), frame))
