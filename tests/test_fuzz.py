"""Random calls of the whole public interface, right and wrong, end in a value or an explanation.

Calls are made up from signatures: an argument's annotation says which pools it is drawn from. They
are Python source, so that what fails can be printed and tried again. They run in child processes,
many in each, so that one that ends its process is noticed, and named.

PYGGML_FUZZ_CALLS=10000 pytest tests/test_fuzz.py makes more of them, PYGGML_FUZZ_SEED others.
"""

from __future__ import annotations

import copy  # noqa: F401  # for calls
import faulthandler
import inspect
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

import pyggml as pg
from pyggml import ag, data, io, nn, optim, train

OWN = str(Path(pg.__file__).parent)
PER_CHILD = 250
SLOW = 10.0  # seconds for one call
STUCK = 30.0
MUCH = 1 << 30  # bytes that one call may add
LIMIT = 4 << 30  # bytes of addresses, beyond which there is no memory

# ---- what arguments are made of ------------------------------------------------------------------

KINDS = {  # of each kind: a pattern of annotations; usual values; odd ones. Their text is Python.
    "array": (
        r"TensorLike|Tensor\b|ArrayLike|np\.ndarray|Any|Batch|object",
        "ag.tensor(np.ones(SHAPE)) | ag.param(np.ones(SHAPE)) | np.ones(SHAPE) | [0.5, 1.5] | 1.5 |"
        "ag.tensor(np.zeros(SHAPE, int)) | np.zeros(SHAPE, np.int32)",
        "ag.tensor(np.full(SHAPE, np.nan)) | ag.param(np.full(SHAPE, -1e30)) | [[1, 2], [3]] | [] |"
        "ag.tensor(np.ones(SHAPE), device='reference') | np.full(SHAPE, 2**40) | np.array('a') |"
        "np.ones(SHAPE, bool) | np.full(SHAPE, 1e300) | np.ones((2, 0)) | np.ones(SHAPE, complex) |"
        "np.array(None) | [ag.tensor(1.0)] | np.ma.masked_array(np.ones(SHAPE), True) |"
        "np.ones((1,) * 5) | ag.tensor(np.full(SHAPE, -7)) | ag.tensor([1.0], dtype='bfloat16') |"
        "np.array(np.datetime64('2020-01-01')) | ag.param(np.ones(SHAPE), dtype='float16')",
    ),
    "count": (
        r"\bint\b|Size|Axis|Budget",
        "1 | 2 | 3 | 4 | -1",
        "0 | -1 | -5 | 2**31 - 1 | 2**31 | 10**20 | 10**400 | True | np.int64(2) | 2.0",
    ),
    "number": (
        r"\bfloat\b|Schedule",
        "0.0 | 0.1 | 0.5 | 1.0 | 2.0",
        "-1.0 | float('nan') | float('inf') | -1e300 | 1e-300 | 1e39 | 10**400 | True",
    ),
    "flag": (r"\bbool\b", "True | False", "1 | np.True_"),
    "sizes": (
        r"Sequence\[int\]|Shape|Size\b|Axis|tuple|Sequence\[tuple",
        "SHAPE | (0,) | (1, 0) | (0, -1) | (2, 2) | ((0, 1), (1, 0)) | (0.5, 0.9)",
        "() | (2**20, 2**20) | (10**20,) | [1, None] | (2**31, 1) | (1.5, 2) | (0, 0) | range(2) |"
        "np.array([1, 2]) | (-1, -1) | (2, 2, 2, 2, 2) | ('a', 'b')",
    ),
    "word": (
        r"\bstr\b|object",
        "'mean' | 'sum' | 'none' | 'tanh' | 'min' | 'max' | 'relu' | 'fan_in' | 'rel' | 'float32' |"
        "'int32' | 'skip' | 'loss' | 'val_loss' | 'sqrt' | 'bfloat16'",
        r"'' | 'x' | '\0' | b'mean' | 'float64' | np.dtype('float16')",
    ),
    "device": (r"Device", "'cpu' | 'reference' | pg.devices()[0]", "'cuda' | 'vulkan9'"),
    "nothing": (r"None", "None", "None"),
    "function": (
        r"Callable|Schedule|Loss|Metric|Forward|Layer|Any",
        "ag.relu | ag.mse_loss | lambda *a: a[0] | train.accuracy | lambda t: 0.1 | nn.ReLU()",
        "lambda: 0 | lambda *a: None | lambda *a: 'a' | lambda *a: float('nan') | repr",
    ),
    "dict": (
        r"Mapping|dict",
        "{} | {'weight': np.ones(SHAPE)} | {'w': ag.param([1.0])} | nn.Linear(2, 2).state_dict() |"
        "{'seed': 1, 'draws': 2} | optim.Adam([ag.param([1.0])]).state_dict() |"
        "{ag.param([1.0]): ag.tensor([1.0])}",
        "{1: 2} | {'a': None} | {'t': 'a'} | [(1, 2)] | {'params': None}",
    ),
    "parameters": (
        r"Parameters|Iterable\[Tensor\]|Sequence\[Tensor",
        "[ag.param(np.ones(SHAPE))] | nn.Linear(2, 2).parameters() | {'w': ag.param([1.0, 2.0])} |"
        "[{'params': [ag.param([1.0])], 'lr': 0.5}]",
        "[] | [ag.tensor([1.0])] | [None] | ag.param([1.0]) | ['a'] | [{'params': None}] | [1.0] |"
        "[ag.param([1.0]), ag.param([1.0], device='reference')] | [{'a': 1}] | [ag.tensor([1])]",
    ),
    "module": (
        r"Module|Any",
        "nn.Linear(2, 2) | nn.Sequential(nn.Linear(2, 2), nn.ReLU()) | nn.Dropout()",
        "nn.Module() | nn.Linear | nn.Linear(2, 2).to('reference')",
    ),
    "optimizer": (
        r"Optimizer",
        "optim.SGD([ag.param([1.0])]) | optim.Adam(nn.Linear(2, 2).parameters())",
        "optim.Optimizer([ag.param([1.0])], 0.1) | optim.SGD",
    ),
    "batches": (
        r"Iterable\[Any\]|Any|Sequence",
        "data.DataLoader((np.ones((4, 2)), np.ones((4, 2))), batch_size=2) |"
        "[(np.ones((2, 2)), np.ones((2, 2)))] | (np.ones((3, 2)), np.zeros(3, int))",
        "[np.ones(2)] | [(1.0, 2.0)] | [()] | [({}, {})] | iter([1, 2]) | [None, None]",
    ),
    "path": (
        r"Path",
        "'new.safetensors' | 'weights.safetensors' | 'state.safetensors'",
        r"'no/such/folder' | '.' | 'text.txt' | 'a\0b' | 7 | ''",
    ),
    "generator": (r"Generator", "pg.Generator(1)", "np.random.default_rng(0) | 7"),
    "callback": (
        r"Callback",
        "[train.LearningRateLogger()] | ()",
        "train.LearningRateLogger() | [train.EarlyStopping()] | [None]",
    ),
}
SHAPES = ["()", "(1,)", "(2,)", "(3,)", "(2, 2)", "(2, 3)", "(3, 2)", "(4, 2, 3)", "(2, 3, 4, 4)"]

EXPRESSIONS = [  # T is a tensor, X anything
    *(f"T {op} X" for op in "+ - * / @ ** == != < > <= >=".split()),
    *(f"X {op} T" for op in "+ - * / @ ** ==".split()),
    *"T[X] | -T | abs(T) | float(T) | int(T) | bool(T) | len(T) | list(T) | T.T".split(" | "),
    *"np.asarray(T) | np.sum(T) | np.add(T, X) | format(T, '.2f') | with_grad(X)".split(" | "),
    *"setattr(T, 'requires_grad', X) | setattr(T, 'grad', X) | copy.deepcopy(T)".split(" | "),
]


# ---- calls ---------------------------------------------------------------------------------------

# What people do not call: made by pyggml itself, or written by them for pyggml to call.
NOT_CALLED = {"Device", "FitState", "init_single", "numbers", "update_single", "on_step_end",
              "on_epoch_end", "on_fit_end", "map_arrays", "batch_length"}  # fmt: skip


def public() -> Iterator[tuple[str, Any]]:
    """Yield everything that can be called by a public name, with the name as people write it."""
    modules = {"pg": pg, "ag": ag, "nn": nn, "nn.init": nn.init, "optim": optim, "data": data,
               "io": io, "train": train}  # fmt: skip
    for prefix, module in modules.items():
        home = module.__name__
        own = [n for n, x in vars(module).items() if getattr(x, "__module__", None) == home]
        for name in getattr(module, "__all__", None) or own:
            thing = getattr(module, name)
            is_error = inspect.isclass(thing) and issubclass(thing, Exception)
            if callable(thing) and not is_error and not name.startswith("_"):
                if name not in NOT_CALLED:
                    yield f"{prefix}.{name}", thing


def methods(cls: type) -> list[str]:
    """Return the names of the public methods of a class."""
    names = [name for name in dir(cls) if not name.startswith("_") and name not in NOT_CALLED]
    return [name for name in names if callable(getattr(cls, name))]


PUBLIC = dict(public())
CLASSES = [name for name in PUBLIC if inspect.isclass(PUBLIC[name])]
NAMES = [*PUBLIC, *CLASSES, *EXPRESSIONS]


def arguments(rng: Random, function: Callable[..., Any], base: str, wild: bool = True) -> str:
    """Return the source of the arguments of a function, as its signature asks for them."""
    by_place, by_name = [], {}
    parameters = list(inspect.signature(function).parameters.values())
    if any(p.name == "common" for p in parameters):
        parameters += inspect.signature(optim.Optimizer).parameters.values()
    for p in parameters:
        annotation = "Module" if p.kind is p.VAR_KEYWORD else str(p.annotation)
        is_needed = p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        if p.name in ("self", "method", "common") or (not is_needed and rng.random() > 0.3):
            continue
        text = argument(rng, annotation, base, wild)
        if (is_needed and p.kind is not p.KEYWORD_ONLY) or p.kind is p.VAR_POSITIONAL:
            by_place.append(text)
        else:
            by_name["model" if p.kind is p.VAR_KEYWORD else p.name] = text
    return ", ".join([*by_place, *(f"{name}={text}" for name, text in by_name.items())])


def argument(rng: Random, annotation: str, base: str, wild: bool = True) -> str:
    """Return the source of one argument: mostly of the annotated kind, sometimes of any."""
    kinds = [kind for kind, (pattern, _, _) in KINDS.items() if re.search(pattern, annotation)]
    luck = rng.random() if wild else 0.0
    kind = rng.choice(list(KINDS) if luck > 0.9 or not kinds else kinds)
    _, usual, odd = KINDS[kind]
    text = rng.choice((odd if luck > 0.7 else usual).split("|")).strip()
    return text.replace("SHAPE", rng.choice([base, base, rng.choice(SHAPES)]))


def call(rng: Random, name: str) -> str:
    """Return a random call of a public name, or of a method of the class that it is."""
    base, thing = rng.choice(SHAPES), PUBLIC.get(name)
    if thing is None:  # an expression
        parts = {"T": argument(rng, "Tensor", base), "X": argument(rng, "Any", base)}
        parts["T"] = f"ag.tensor({parts['T']})"
        return re.sub(r"\b[TX]\b(?<!\.T)", lambda found: f"({parts[found[0]]})", name)
    if not inspect.isclass(thing):
        return f"{name}({arguments(rng, thing, base)})"
    if issubclass(thing, ag.Tensor):
        made, method = f"ag.param(np.ones({base}))", rng.choice(methods(thing))
    else:
        method = rng.choice(["", *methods(thing)] if rng.random() < 0.7 else [""])
        made = f"{name}({arguments(rng, thing, base, wild=not method)})"
    if not method:
        return made
    made += "" if method == "forward" else f".{method}"
    return f"{made}({arguments(rng, getattr(thing, method), base)})"


# ---- running them --------------------------------------------------------------------------------


def with_grad(gradient: Any) -> Any:
    """Return an optimizer whose parameter has a given gradient, after its step."""
    w = ag.param([1.0, 2.0])
    w.grad = gradient
    opt = optim.SGD([w])
    opt.step()
    return opt


def run(made: Callable[[], Any], device: str = "cpu") -> None:
    """Make a call on a tape, and do with its result what people do: read, differentiate, step."""
    with pg.device(device):
        with ag.grad_tape():
            value = made()
        look(value)


def look(value: Any) -> None:
    """Use a value in the ways that its kind offers."""
    repr(value)
    if isinstance(value, ag.Tensor):
        value.numpy()
        if value.requires_grad:
            ag.backward(value, seed=np.ones(value.shape))
            if value.is_leaf:
                optim.SGD([value]).step()
    elif isinstance(value, nn.Module):
        value.load_state_dict(value.state_dict())
        value.train().eval()
    elif isinstance(value, optim.Optimizer):
        with ag.grad_tape():
            loss = sum(ag.sum(p * p) for p in value.params if p.device is value.params[0].device)
        ag.backward(loss)
        value.step()
        value.load_state_dict(value.state_dict())
    elif isinstance(value, (tuple, list, data.DataLoader)):
        for part in islice(value, 3):
            look(part)
    elif hasattr(value, "__enter__"):
        with value:
            (ag.tensor([1.0]) * 2.0).numpy()
    elif inspect.isfunction(value) and value.__module__.startswith("pyggml.optim"):
        for t in (0, 1, 7, 10**6):
            value(t)


SIGNATURE = r"(missing|takes|got an unexpected|got multiple|got some positional|positional arg)"


def is_allowed(error: BaseException, source: str) -> bool:
    """Tell whether an exception explains itself: pyggml's own, or Python's for a wrong call."""
    if isinstance(error, pg.PyggmlError):
        return bool(str(error))
    last = traceback.extract_tb(error.__traceback__)[-1]
    if last.filename == "<call>":  # Python's own: nothing of pyggml was reached
        return True
    misfit = re.match(rf"(<?\w+)\S*\(\) {SIGNATURE}", str(error))
    if isinstance(error, TypeError) and misfit and misfit[1].strip("<_") in source:
        return True  # a function that was given takes other arguments
    if isinstance(error, OSError) and not isinstance(error, TimeoutError):
        return True  # documented: a file that is not there, or cannot be written
    kinds = (TypeError, NotImplementedError)  # len of a loader, forward of a bare module
    own_words = last.filename.startswith(OWN) and (last.line or "").startswith("raise")
    return isinstance(error, kinds) and own_words and bool(str(error))


def attempt(source: str) -> str | None:
    """Run a call; return what is wrong with how it ended, if anything."""
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    found = None
    try:
        eval(compile(f"run(lambda: {source})", "<call>", "eval"), globals())
    except Exception as error:
        if not is_allowed(error, source):
            own = [f for f in traceback.extract_tb(error.__traceback__) if OWN in f.filename]
            where = f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else "outside"
            found = f"{type(error).__name__} at {where}: {str(error)[:300]}"
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    if time.monotonic() - started > SLOW:
        found = f"took {time.monotonic() - started:.1f} s"
    if grown > MUCH:
        found = f"took {grown >> 20} MiB"
    return found


def child(seed: int, count: int, current: str) -> None:
    """Make calls, note each in a file before it begins, and print what is wrong as JSON lines."""
    warnings.simplefilter("error")
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + LIMIT, size + LIMIT))
    io.save_weights("weights.safetensors", nn.Linear(2, 2))
    io.save_state("state.safetensors", model=nn.Linear(2, 2), step=1)
    Path("text.txt").write_text("no weights")

    sys.stdout = open(os.devnull, "w")  # what print and summary write
    rng, names = Random(seed), NAMES * -(-count // len(NAMES))
    rng.shuffle(names)
    for name in names[:count]:
        source = call(rng, name) + rng.choice(["", "", ", 'reference'"])
        Path(current).write_text(source)
        faulthandler.dump_traceback_later(STUCK, exit=True)
        found = attempt(source)
        faulthandler.cancel_dump_traceback_later()
        pg.set_device("cpu")
        if found:
            print(json.dumps([found, source]), file=sys.__stdout__, flush=True)


def findings(seed: int, count: int) -> list[tuple[str, str]]:
    """Make calls in a child process; return what is wrong, with the source of the call."""
    with tempfile.TemporaryDirectory() as folder:
        current = Path(folder, "current")
        done = subprocess.run(
            [sys.executable, __file__, str(seed), str(count), str(current)],
            capture_output=True, text=True, cwd=folder, check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )  # fmt: skip
        found = [tuple(json.loads(line)) for line in done.stdout.splitlines()]
        if done.returncode:
            last = current.read_text() if current.exists() else "no call at all"
            found.append((f"the process ended, {done.returncode}: {done.stderr[-3000:]}", last))
    return found


def test_random_calls_end_in_a_value_or_an_error_that_explains_itself():
    seed = int(os.environ.get("PYGGML_FUZZ_SEED", "0"))
    left = int(os.environ.get("PYGGML_FUZZ_CALLS", "600"))
    print(f"PYGGML_FUZZ_SEED={seed} PYGGML_FUZZ_CALLS={left}")
    wrong: dict[str, tuple[str, str]] = {}
    while left > 0:
        for reason, source in findings(seed, min(left, PER_CHILD)):
            kind = re.sub(r"[\d.]+ ", "", " ".join(reason.split(":")[:2]))
            wrong[kind] = min(
                wrong.get(kind, (reason, source)), (reason, source), key=lambda w: len(w[1])
            )
        seed, left = seed + 1, left - PER_CHILD
    listed = "\n".join(f"{why}\n    run(lambda: {source})" for why, source in wrong.values())
    assert not wrong, (
        f"{len(wrong)} kinds of wrong ends; to try one again, from tests/: python -c 'from "
        f"test_fuzz import *; run(...)'\n{listed}"
    )


if __name__ == "__main__":
    child(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
