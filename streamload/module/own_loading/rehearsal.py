"""What modules do with names while torch loads them, rehearsed without values.

``_load_from_state_dict`` and the hooks before it may rename, drop and add entries of the state
dict. They are run on twins of the modules, whose tensors are on meta, with stand-ins on meta for
what is stored: which stand-in arrives where says what is to be streamed there. Code that looks at
values, or changes more than names, cannot be followed in this way and is refused by name.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from streamload.core.errors import StreamloadError
from streamload.module.extra_state import Remembered, is_container
from streamload.module.own_loading.twins import LOADS, twin_of
from streamload.module.own_loading.watching import Refused, Watch, untouched

_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_TABLES = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})
_ABSENT = object()
# torch's own: they add what is missing in old files, and do nothing where nothing is.
_TORCHS = ("torch.nn.modules.batchnorm", "torch.nn.modules.instancenorm")


@dataclass
class Rehearsal:
    """What the modules made of the entries they were given; all names are dotted.

    Attributes:
        sources: a tensor of the module → the entry that fills it.
        made: a tensor of the module → the value that its code gives it.
        kept: tensors of the module that its code leaves as they are.
        dropped: entries that its code takes out, unused.
        attributes: (path of a module, attribute, plain value) that its code set.
        problems: what cannot be followed.
    """

    sources: dict[str, str] = field(default_factory=dict)
    made: dict[str, torch.Tensor] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)
    dropped: set[str] = field(default_factory=set)
    attributes: list[tuple[str, str, object]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def refuse(self, module: nn.Module, path: str, what: str) -> None:
        """Note what the module at ``path`` does that cannot be followed."""
        place = f"module {path!r}" if path else "the module"
        self.problems.append(
            f"{place} ({type(module).__name__}) takes part in its own loading and {what}, which "
            "cannot be streamed: load it by torch's own load_state_dict(), with what "
            "streamload.load_state_dict() returns"
        )


def takes_part(module: nn.Module) -> bool:
    """True if the module has code of its own that torch runs before it copies tensors."""
    code = type(module)._load_from_state_dict
    overrides = code is not nn.Module._load_from_state_dict or LOADS in vars(module)
    return overrides or bool(module._load_state_dict_pre_hooks)


def has_own_load_state_dict(module: nn.Module) -> bool:
    """True if torch would run code of the module's class instead of its own ``load_state_dict``."""
    code: Any = type(module).load_state_dict
    is_torchs = code.__module__ == "torch" or code.__module__.startswith("torch.")
    return not is_torchs or "load_state_dict" in vars(module)


def is_torchs_own(module: nn.Module) -> bool:
    """True if the module only takes part as torch's normalisation layers do."""
    code: Any = type(module)._load_from_state_dict
    has_more = module._load_state_dict_pre_hooks or LOADS in vars(module)
    return code.__module__ in _TORCHS and not has_more


def rehearse(
    module: nn.Module,
    entries: Mapping[str, torch.Tensor],
    versions: Mapping[str, Mapping[str, Any]],
) -> Rehearsal:
    """Have the modules' own code rename and drop ``entries``; the module is not changed.

    Args:
        module: its tensors may be on meta.
        entries: a stand-in on meta for each tensor, by the name torch would find it under.
        versions: module path → what its state dict noted of it (``version`` and more).
    """
    names = {id(tensor): name for name, tensor in entries.items()}
    result = Rehearsal()
    with untouched(module) as before:
        _Visit(names, versions, result).module(twin_of(module), dict(entries), "")
        for path, remembered in before.items():
            if changed := remembered.changed():
                what = f"changes its attribute {changed[0]!r}, or a hook does"
                result.refuse(module.get_submodule(path), path, what)
    return result


def allowed_by_hooks(
    module: nn.Module, missing: Iterable[str], unexpected: Iterable[str]
) -> tuple[set[str], set[str]]:
    """The missing and unexpected names that hooks after the load take out of torch's lists."""
    lists = _IncompatibleKeys(list(missing), list(unexpected))
    before = set(lists.missing_keys), set(lists.unexpected_keys)
    twin = twin_of(module)
    try:
        with untouched(module), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run_post_hooks(twin, lists)
    except Exception:  # a hook that needs values says nothing of names
        return set(), set()
    return before[0] - set(lists.missing_keys), before[1] - set(lists.unexpected_keys)


def run_post_hooks(module: nn.Module, lists: _IncompatibleKeys) -> None:
    """Call every hook after the load, children first, as torch does."""
    for child in module._modules.values():
        if child is not None:
            run_post_hooks(child, lists)
    for hook in list(module._load_state_dict_post_hooks.values()):
        if hook(module, lists) is not None:
            raise StreamloadError(
                f"a hook of {type(module).__name__} after loading returned a value; it must "
                "change the lists of names in place and return None"
            )


def _is_plain(value: Any) -> bool:
    if is_container(value):
        parts = value.values() if isinstance(value, dict) else value
        return all(isinstance(part, _PLAIN) for part in parts)
    return isinstance(value, _PLAIN)


@dataclass(frozen=True)
class _Visit:
    """One walk over the twins, as ``nn.Module.load_state_dict`` walks."""

    names: Mapping[int, str]
    versions: Mapping[str, Mapping[str, Any]]
    result: Rehearsal

    def module(self, twin: nn.Module, entries: dict[str, torch.Tensor], prefix: str) -> None:
        own: dict[str, torch.Tensor] = {
            prefix + name: tensor
            for table in (twin._parameters, twin._buffers)
            for name, tensor in table.items()
            if tensor is not None and name not in twin._non_persistent_buffers_set
        }
        given = dict(entries)
        if takes_part(twin):
            given = self._run(twin, entries, prefix, own)
        numbers = {id(tensor) for tensor in own.values()}
        for key in own:
            value = given.get(key)
            if value is None:
                continue
            if id(value) in self.names:
                self.result.sources[key] = self.names[id(value)]
            elif id(value) in numbers:
                self.result.kept.add(key)
            elif isinstance(value, torch.Tensor) and not value.is_meta:
                self.result.made[key] = value.detach()
            else:
                self.result.refuse(twin, prefix[:-1], f"computes {key!r} from what is stored")
        for name, child in twin._modules.items():
            if child is not None:
                start = f"{prefix}{name}."
                self.module(child, {k: v for k, v in entries.items() if k.startswith(start)}, start)

    def _run(
        self,
        twin: nn.Module,
        entries: dict[str, torch.Tensor],
        prefix: str,
        own: Mapping[str, torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        """Run one module's own code; what its tensors would get. ``entries`` is changed by it."""
        before, missing, unexpected = dict(entries), list[str](), list[str]()
        remembered = Remembered(twin)
        version = dict(self.versions.get(prefix[:-1], {}))
        watch = Watch(self.names, {id(tensor): key for key, tensor in own.items()})
        try:
            with watch, warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")
                twin._load_from_state_dict(entries, prefix, version, True, missing, unexpected, [])
        except Refused as error:
            self.result.refuse(twin, prefix[:-1], str(error))
            return {}
        except Exception as error:
            first = str(error).partition("\n")[0]
            self.result.refuse(
                twin, prefix[:-1], f"fails without values ({type(error).__name__}: {first})"
            )
            return {}
        if watch.used:
            used = ", ".join(map(repr, sorted(watch.used)))
            self.result.refuse(twin, prefix[:-1], f"computes with {used}")
        changed = remembered.changed()
        if watch.changed or not _TABLES.isdisjoint(changed):
            self.result.refuse(twin, prefix[:-1], "changes its own tensors")
        for name in (name for name in changed if name not in _TABLES):
            value = vars(twin).get(name, _ABSENT)
            if _is_plain(value):
                self.result.attributes.append((prefix[:-1], name, value))
            else:
                self.result.refuse(twin, prefix[:-1], f"changes its attribute {name!r}")
        given = {key: entries[key] for key in own if key in entries} | watch.copied
        still = {id(value) for value in (*entries.values(), *given.values())}
        depth = prefix.count(".")
        for key, value in before.items():
            is_gone = id(value) not in still
            is_leaf = (
                key.count(".") == depth or key[len(prefix) :].split(".")[0] not in twin._modules
            )
            is_passed = key in entries and key not in own and is_leaf and key not in unexpected
            if id(value) in self.names and (is_gone or is_passed):
                self.result.dropped.add(self.names[id(value)])
        # What the module's code does not call missing it leaves as it is.
        self.result.kept |= {key for key in own if key not in given and key not in missing}
        return given
