"""Building a module without its weights: parameters on meta, buffers real, no initialisation."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from streamload.module.torch_mode import TorchMode

# Methods that write values and nothing else. On a meta tensor they do nothing, but some import
# over a thousand modules to do it (2.3 s for the first ``nn.Embedding`` of a process).
_VALUE_METHODS = frozenset(
    (
        Tensor.add_,
        Tensor.bernoulli_,
        Tensor.cauchy_,
        Tensor.clamp_,
        Tensor.clamp_max_,
        Tensor.clamp_min_,
        Tensor.copy_,
        Tensor.div_,
        Tensor.erfinv_,
        Tensor.exponential_,
        Tensor.fill_,
        Tensor.geometric_,
        Tensor.log_normal_,
        Tensor.mul_,
        Tensor.normal_,
        Tensor.random_,
        Tensor.sub_,
        Tensor.uniform_,
        Tensor.zero_,
    )
)
_INIT_FUNCTIONS = frozenset(
    function
    for name, function in vars(nn.init).items()
    if name.endswith("_") and not name.startswith("_") and callable(function)
)


@contextmanager
def empty_weights() -> Iterator[None]:
    """Modules built inside have parameters on the meta device and real buffers.

    Every parameter keeps its class, attributes, ``requires_grad`` and ties, and no
    initialisation runs for it, neither torch's nor the module's own. Buffers are computed as
    ever: a causal mask or position ids registered in ``__init__`` have their values. Memory that
    ``torch.empty`` reserves for a parameter is let go untouched, so that it is never used.

    Code in a constructor that needs a parameter's values, as ``weight.max().item()`` or
    ``if weight.any()`` do, gets torch's own RuntimeError for meta tensors: there are none yet.

    Holds for the calling thread only; may be nested; what was before is back after it, also
    after an exception.
    """
    outer = getattr(_thread, "twins", None)
    if outer is not None:
        yield
        return
    _hook.acquire()
    _thread.twins = WeakIdKeyDictionary()
    try:
        with _NoInitialisation():
            yield
    finally:
        _thread.twins = None
        _hook.release()


# ``twins``: the meta parameter for each real one met so far, or None outside the context. A
# parameter that two modules share must become one meta parameter, not two.
_thread = threading.local()


def _to_meta(_module: nn.Module, _name: str, parameter: nn.Parameter) -> nn.Parameter | None:
    """Registration hook: the parameter to register in place of ``parameter``, or None for it."""
    twins = getattr(_thread, "twins", None)
    if twins is None or parameter.is_meta or isinstance(parameter, _LAZY):
        return None
    twin: nn.Parameter | None = twins.get(parameter)
    if twin is None:
        twin = twins[parameter] = _meta_twin(parameter)
    return twin


# Lazy parameters take their shape at the first forward: they have no place on meta before it.
_LAZY = (nn.parameter.UninitializedParameter,)


def _meta_twin(parameter: nn.Parameter) -> nn.Parameter:
    data = torch.empty_like(parameter.detach(), device="meta")
    kind = type(parameter)
    twin: Any
    if nn.Parameter in kind.__mro__:
        # Not by calling the class: a subclass's own constructor may ask for anything.
        twin = Tensor._make_subclass(kind, data, parameter.requires_grad)
    else:
        # A tensor subclass that torch marks as a parameter rather than wrapping it.
        twin = data.requires_grad_(parameter.requires_grad)
    twin.__dict__.update(parameter.__dict__)
    made: nn.Parameter = twin
    return made


class _NoInitialisation(TorchMode):
    """Skips functions that only give values to a parameter. Modes belong to one thread."""

    def call(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Return the tensor as it is where only its values would change."""
        if func in _INIT_FUNCTIONS:
            target = args[0] if args else kwargs.get("tensor")
            if isinstance(target, nn.Parameter) or _is_meta(target):
                return target
        elif func in _VALUE_METHODS and args and _is_meta(args[0]):
            return args[0]
        return func(*args, **kwargs)


def _is_meta(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_meta


class _Hook:
    """torch's table of registration hooks is one per process: ours is in it while it is needed.

    Taking an entry out raises in a thread that is just walking the table, that is building a
    module. So the hook, which does nothing for threads outside the context, stays in while other
    threads are alive, and goes with the first context that ends without them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._handle: RemovableHandle | None = None

    def acquire(self) -> None:
        with self._lock:
            self._users += 1
            if self._handle is None:
                hook: Any = _to_meta  # torch annotates hooks as returning None; a result counts
                self._handle = register_module_parameter_registration_hook(hook)

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            quiet = self._users == 0 and threading.active_count() == 1
            if quiet and self._handle is not None:
                self._handle.remove()
                self._handle = None


_hook = _Hook()
