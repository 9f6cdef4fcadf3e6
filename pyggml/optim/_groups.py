"""Groups of parameters with settings of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ..checks import as_list, number_in, shown
from ..errors import SettingError
from ..tensor import Parameter, Tensor

if TYPE_CHECKING:
    from ..nn import Module

Parameters = Iterable[Tensor] | Mapping[str, Tensor] | Iterable[Mapping[str, Any]]
Schedule = Callable[[int], float]


class Group:
    """Parameters that share settings. A setting that is None is the optimizer's.

    Args:
        params: the parameters.
        lr: a learning rate of their own, a number or a schedule.
        lr_scale: a factor of the learning rate, which follows the optimizer's schedule.
        weight_decay: a weight decay of their own.

    Each may be changed at any time: ``opt.groups[1].lr_scale = 0.1``.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        *,
        lr: float | Schedule | None = None,
        lr_scale: float = 1.0,
        weight_decay: float | None = None,
        method: str = "Group",
    ) -> None:
        self._method = method  # for messages
        self.params = leaf_tensors(method, params)
        self.lr = lr
        self.lr_scale = lr_scale
        self.weight_decay = weight_decay

    @property
    def lr(self) -> float | Schedule | None:
        """The learning rate: a number, a schedule, or None."""
        return self._lr

    @lr.setter
    def lr(self, value: float | Schedule | None) -> None:
        if value is not None and not callable(value):
            value = number_in(self._method, "lr", value, 0.0)
        self._lr = value

    @property
    def lr_scale(self) -> float:
        """The factor of the learning rate."""
        return self._lr_scale

    @lr_scale.setter
    def lr_scale(self, value: float) -> None:
        self._lr_scale = number_in(self._method, "lr_scale", value, 0.0)

    @property
    def weight_decay(self) -> float | None:
        """The weight decay, or None."""
        return self._weight_decay

    @weight_decay.setter
    def weight_decay(self, value: float | None) -> None:
        if value is not None:
            value = number_in(self._method, "weight_decay", value, 0.0)
        self._weight_decay = value

    def rate(self, t: int) -> float | None:
        """Return the learning rate after t updates, without lr_scale."""
        if not callable(self._lr):
            return self._lr
        return number_in(self._method, "lr", self._lr(t), 0.0)


SETTINGS = ("lr", "lr_scale", "weight_decay")


def make_groups(method: str, params: Parameters) -> list[Group]:
    """Return the groups of an optimizer's ``params``; a parameter listed twice counts once.

    Raises SettingError for what is no parameter, for none, for one that is in two groups, and for
    settings that groups do not have.
    """
    if isinstance(params, Tensor):
        raise SettingError(f"{method}: needs a list of parameters; got one tensor; write [w]")
    if hasattr(params, "parameters"):
        raise SettingError(f"{method}: needs parameters; got a module; write model.parameters()")
    values = params.values() if isinstance(params, Mapping) else params
    listed = as_list(method, "params", values, "parameters")
    if not any(isinstance(item, Mapping) for item in listed):
        listed = [{"params": listed}]
    groups = [_make_group(method, item) for item in listed]
    seen: dict[Tensor, Group] = {}
    for group in groups:
        for parameter in group.params:
            if parameter in seen:
                raise SettingError(
                    f"{method}: a parameter of shape {parameter.shape} is in two groups"
                )
            seen[parameter] = group
    if not seen:
        raise SettingError(f"{method}: needs at least one parameter; got none")
    return groups


def _make_group(method: str, item: Any) -> Group:
    if not isinstance(item, Mapping) or "params" not in item:
        got = f"keys {sorted(item)}" if isinstance(item, Mapping) else type(item).__name__
        raise SettingError(f'{method}: each group must be a dict with "params"; got {got}')
    unknown = set(item) - {"params", *SETTINGS}
    if unknown:
        raise SettingError(
            f"{method}: a group has params, {', '.join(SETTINGS)}; got {', '.join(sorted(unknown))}"
        )
    settings = {name: item[name] for name in SETTINGS if name in item}
    params = item["params"]
    listed = [params] if isinstance(params, Tensor) else params
    values = listed.values() if isinstance(listed, Mapping) else listed
    return Group(values, **settings, method=method)


def leaf_tensors(op: str, params: Any) -> list[Tensor]:
    """Return parameters, each once; raise SettingError for what optimizers cannot change."""
    listed = as_list(op, "params", params, "parameters")
    for value in listed:
        source = value._source if isinstance(value, Tensor) and value.is_leaf else None
        if source is None or (source.owner is None and not isinstance(value, Parameter)):
            kind = f"a tensor of shape {value.shape}" if isinstance(value, Tensor) else shown(value)
            raise SettingError(f"{op}: needs parameters made with ag.param; got {kind}")
    return list(dict.fromkeys(listed))


def decay_groups(
    params: Module | Iterable[Tensor] | Mapping[str, Tensor], *, weight_decay: float
) -> list[dict[str, Any]]:
    """Return two groups: parameters of two or more axes, with weight decay, and the others without.

    Those with one axis are biases, and the scales and shifts of norms. Takes a module, or a list or
    dict of parameters; frozen ones are left out.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> groups = optim.decay_groups(model, weight_decay=0.1)
    >>> [(len(group["params"]), group["weight_decay"]) for group in groups]
    [(2, 0.1), (2, 0.0)]
    >>> opt = optim.AdamW(groups, lr=1e-3)
    """
    decay = number_in("decay_groups", "weight_decay", weight_decay, 0.0)
    listed: Parameters = params.parameters() if hasattr(params, "parameters") else params
    free = [p for p in make_groups("decay_groups", listed)[0].params if p.requires_grad]
    groups = [
        {"params": [p for p in free if p.ndim >= 2], "weight_decay": decay},
        {"params": [p for p in free if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
