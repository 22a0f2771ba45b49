"""A transformers model for a checkpoint: its class and configuration, its tensors as targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from streamload.core.dtypes import BY_NAME, BY_TORCH_NAME, DType
from streamload.core.errors import CheckpointError, MissingExtraError, PlanError
from streamload.core.specs import Catalog
from streamload.core.wording import printable
from streamload.hf.library import (
    Model,
    Names,
    auto_class,
    built,
    dtype_rule,
    finish,
    is_model,
    is_part,
    settle_dtype,
    unspoken,
)
from streamload.hf.their_names import TheirBinding, bind_part, bind_theirs
from streamload.mapping.binding import Binding
from streamload.mapping.choose import under_prefix
from streamload.mapping.fields import quantisation
from streamload.planning.devices import device_of
from streamload.planning.records import Plan, Targets, TargetSpec
from streamload.sources.base import Source
from streamload.sources.hub import folder_of


@dataclass(frozen=True)
class TheirModule:
    """A module of transformers that is loaded into.

    Attributes:
        model: the module.
        dtype: what is asked for; None where stored dtypes are kept.
        is_made: it was built here, just as ``from_pretrained`` builds it: its dtypes are what
            values are cast to, and what no file fills is computed or initialised afterwards.
        key_mapping: renames of the caller's own, before the library's.
    """

    model: Model
    dtype: torch.dtype | None = None
    is_made: bool = False
    key_mapping: Mapping[str, str] | None = None

    @cached_property
    def names(self) -> Names:
        return Names(self.model, self.key_mapping)

    def targets(self, found: Targets) -> Targets:
        """The module's tensors, with what the library has to say about them."""
        kept = dtype_rule(self.model, self.dtype)
        quiet, _ = unspoken(self.model, missing=found)
        return Targets(tuple(self._spec(spec, kept, quiet) for spec in found.specs))

    def _spec(
        self, spec: TargetSpec, kept: Callable[[str], torch.dtype | None], quiet: set[str]
    ) -> TargetSpec:
        dtype = next((found for name in spec.names if (found := kept(name)) is not None), None)
        if self.is_made:
            is_wanted = spec.persistent and quiet.isdisjoint(spec.names)
            spec = replace(spec, is_settled=True, is_made_later=True, persistent=is_wanted)
        elif spec.kind == "buffer":
            dtype = dtype or self.dtype
        # The library casts what it keeps in float32 even if it is a counter.
        if dtype is None or not (self.is_made or (self._is_empty and _is_floating(spec))):
            return spec
        name = BY_TORCH_NAME[str(dtype).removeprefix("torch.")].name
        return replace(spec, dtype=name, is_settled=True)

    @cached_property
    def _is_empty(self) -> bool:
        return any(p.is_meta for p in self.model.parameters())

    def finish(self, plan: Plan) -> None:
        """Compute buffers and initialise what no file fills, once the weights are in."""
        filled = {name for t in plan.tensors for name in (t.name, *t.aliases)}
        missing = [name for name in self.model.state_dict() if name not in filled]
        finish(self.model, missing=missing, device_of=lambda n: device_of(n, plan.options.device))
        self.names.keep_used()


def _is_floating(spec: TargetSpec) -> bool:
    return BY_NAME[spec.dtype].is_floating


def their_module(module: object, dtype: DType | None) -> TheirModule | None:
    """The caller's own module, if it is a model of transformers."""
    return TheirModule(module, _torch_dtype(dtype)) if is_model(module) else None


def bind_by_library(
    source: Source,
    module: nn.Module,
    theirs: TheirModule | None,
    prefix: str | None,
    config: Mapping[str, Any] | None,
    other: Binding,
) -> TheirBinding | None:
    """What the library's own names make of a checkpoint.

    A layer or another part of a model is bound by the names of the whole model of ``config``.

    Args:
        source: the open checkpoint.
        module: what is loaded into.
        theirs: the same, if it is a model of the library.
        prefix: of the stored names that are for it.
        config: as in ``config.json``.
        other: what was found without the library.

    Returns:
        None if ``other`` finds a place for more of what is stored.
    """
    found = []
    if theirs is not None:
        found.append(bind_theirs(theirs.names, under_prefix(source.catalog, prefix)))
        if theirs.is_made:
            return found[0]
    if all(one.binding.unexpected for one in found) and other.unexpected and is_part(module):
        folder = folder_of(source.path)
        # The part's own names may do without the whole; what they lack is told then.
        with suppress(CheckpointError, PlanError):
            whole = empty_model(config or {}, source.catalog, None, folder=folder, path=source.path)
            targets = module.state_dict().keys()
            found.append(bind_part(whole.names, source.catalog, prefix, targets))
    best = min(found, key=lambda one: len(one.binding.unexpected), default=None)
    if best is None or len(best.binding.unexpected) > len(other.unexpected):
        return None
    return best


def empty_model(
    config: Mapping[str, Any],
    catalog: Catalog,
    dtype: DType | None,
    *,
    folder: str,
    path: str,
    cls: Any = None,
    key_mapping: Mapping[str, str] | None = None,
) -> TheirModule:
    """The model for a checkpoint, on meta, as ``from_pretrained`` builds it.

    Args:
        config: as in ``config.json``.
        catalog: of the checkpoint.
        dtype: as asked for.
        folder: where ``config.json`` is.
        path: the checkpoint's, for messages.
        cls: an Auto class or a model class; None for what ``architectures`` says.
        key_mapping: see TheirModule.
    """
    try:
        import transformers
    except ImportError as error:
        raise MissingExtraError(
            "transformers", extra="transformers", purpose="load_transformers"
        ) from error
    if not config:
        raise CheckpointError("no config.json beside the checkpoint: nothing to build", path=path)
    if cls is not None and not hasattr(cls, "from_pretrained"):
        raise TypeError(
            f"cls takes a class of transformers, such as AutoModelForCausalLM, not {cls!r}"
        )
    model_class = cls or _named_class(config, path=path)
    stored = sorted(catalog.values(), key=lambda spec: (spec.file, spec.name))
    floating = (d for s in stored if (d := BY_NAME[s.made_dtype]).is_floating)
    first = _torch_dtype(next(floating, None)) or torch.get_default_dtype()
    try:
        if getattr(model_class, "_model_mapping", None) is None:
            own = model_class.config_class.from_pretrained(folder, local_files_only=True)
        else:
            own = transformers.AutoConfig.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
            model_class, own = auto_class(model_class, own)
        if not quantisation(config):  # the weights are decoded: the plain class takes them
            for part in (own, getattr(own, "text_config", None)):
                vars(part or own).pop("quantization_config", None)
        settled = settle_dtype(own, _torch_dtype(dtype), first)
        own.name_or_path = folder
        model = built(model_class, own, settled)
    except Exception as error:  # whatever the library's code does with such a configuration
        text = str(error).strip().partition("\n")[0]
        name = getattr(model_class, "__name__", model_class)
        raise PlanError(printable(f"{path}: transformers cannot build {name}: {text}")) from error
    return TheirModule(model, settled, is_made=True, key_mapping=key_mapping)


def _torch_dtype(dtype: DType | None) -> torch.dtype | None:
    if dtype is None or dtype.torch_name is None:
        return None
    found: torch.dtype = getattr(torch, dtype.torch_name)
    return found


def _named_class(config: Mapping[str, Any], *, path: str) -> Any:
    """The class that ``architectures`` of a ``config.json`` names.

    Raises:
        CheckpointError: it names none, or one that the installed transformers has not.
    """
    import transformers

    found = config.get("architectures")
    names = [n for n in found if isinstance(n, str)] if isinstance(found, (list, tuple)) else []
    if not names:
        raise CheckpointError(
            "config.json names no architecture: say which class to build, as "
            "cls=transformers.AutoModel",
            path=path,
        )
    model_class = getattr(transformers, names[0], None)
    if not hasattr(model_class, "from_pretrained"):
        remote = "; the code beside it is not run (trust_remote_code)"
        raise CheckpointError(
            f"config.json: architectures says {names[0]!r}, which transformers "
            f"{transformers.__version__} has not{remote if config.get('auto_map') else ''}",
            path=path,
        )
    return model_class
