"""The only file that touches private parts of transformers; tested with 5.24.

Everything that ``from_pretrained`` does beside reading the weights is done here by the library's
own functions: its conversions and renames of names, the contexts under which it builds a model,
what it keeps in float32, and what it does to a model once the weights are in.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from typing import Any, TypeAlias

import torch
from torch import nn

from streamload.system.quiet_logs import quiet_logs

TESTED_WITH = "5.24"

# Objects of a library that has no types for what is taken from it here.
Model: TypeAlias = Any
Conversion: TypeAlias = Any


def is_imported() -> bool:
    """True if the program has imported the library: else no module of it can be there."""
    return "transformers.modeling_utils" in sys.modules


def is_model(module: object) -> bool:
    """True for the library's models, which know their configuration."""
    base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    return base is not None and isinstance(module, base)


def is_part(module: nn.Module) -> bool:
    """True for modules with something in them that one of the library's models defines."""
    return is_imported() and any(
        type(part).__module__.startswith("transformers.models.") for part in module.modules()
    )


# Names


class Names:
    """A model's own table of stored names, with the library's renames and conversions."""

    def __init__(self, model: Model, key_mapping: Mapping[str, str] | None = None) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        mapping = None if key_mapping is None else dict(key_mapping)
        self.model = model
        self.conversions = get_model_conversion_mapping(model, mapping)
        self._renamings = [c for c in self.conversions if isinstance(c, WeightRenaming)]
        self._converters = [c for c in self.conversions if isinstance(c, WeightConverter)]
        self._by_pattern = {p: c for c in self._converters for p in c.source_patterns}
        self._own: dict[str, torch.Tensor] = model.state_dict()

    def in_their_order(self, names: Iterable[str]) -> list[str]:
        """As the library goes through a file: parts that are numbers by their value."""
        from transformers.core_model_loading import dot_natural_key

        return sorted(names, key=dot_natural_key)

    def renamed(self, name: str) -> tuple[str, str | None]:
        """The module's name for a stored one, and the pattern of a conversion it is a part of."""
        from transformers.core_model_loading import rename_source_key

        prefix = self.model.base_model_prefix
        found, pattern = rename_source_key(
            name, self._renamings, self._converters, prefix, self._own
        )
        if found not in self._own and name in self._own:
            found, pattern = rename_source_key(name, [], [], prefix, self._own)
        return found, pattern

    def has(self, name: str) -> bool:
        """True if the module has a persistent tensor of this name."""
        return name in self._own

    def own(self, name: str) -> torch.Tensor:
        """The module's persistent tensor of this name."""
        return self._own[name]

    def converter(self, pattern: str) -> Conversion:
        """The conversion that the pattern is one of the sources of."""
        return self._by_pattern[pattern]

    def targets(self, converter: Conversion, name: str) -> list[str]:
        """The names of a conversion's targets that the module has, given the first one's."""
        first, *_ = converter.target_patterns
        found = [name.replace(first, other, 1) for other in converter.target_patterns]
        return [target for target in found if self.has(target)]

    def convert(
        self, converter: Conversion, name: str, parts: Sequence[tuple[str, str, torch.Tensor]]
    ) -> dict[str, torch.Tensor]:
        """Carry out a conversion as the library does.

        Args:
            converter: as ``converter`` gives it.
            name: the first target's.
            parts: pattern, stored name and values of each source, in the library's order.

        Returns:
            Values by target name.
        """
        own = deepcopy(converter)
        for pattern, stored, values in parts:
            own.add_tensor(name, stored, pattern, values)
        made = own.convert(name, model=self.model, config=self.model.config)
        return {n: v[0] if isinstance(v, list) else v for n, v in made.items()}

    def is_beside(self, name: str) -> bool:
        """True for what stands beside a base model in a file, as the head of a class around it."""
        from transformers import MODEL_MAPPING

        classes = MODEL_MAPPING.get(type(self.model.config), ())
        is_base = type(self.model) in (classes if isinstance(classes, tuple | list) else [classes])
        first = name.partition(".")[0]
        return is_base and first != self.model.base_model_prefix and not hasattr(self.model, first)

    def keep_used(self) -> None:
        """Have the model know which conversions brought it here, so that it saves itself back."""
        self.model._weight_conversions = [c for c in self.conversions if c.was_used()]


def operations(converter: Conversion) -> tuple[str, ...]:
    """The class names of a conversion's operations, in order."""
    return tuple(type(operation).__name__ for operation in converter.operations)


def unspoken(
    model: Model, *, missing: Iterable[str] = (), unexpected: Iterable[str] = ()
) -> tuple[set[str], set[str]]:
    """Which missing and unexpected names the library passes over in silence."""
    before = _info(missing, unexpected)
    after = _info(missing, unexpected)
    model._adjust_missing_and_unexpected_keys(after)
    return (
        before.missing_keys - after.missing_keys,
        before.unexpected_keys - after.unexpected_keys,
    )


def _info(missing: Iterable[str], unexpected: Iterable[str] = ()) -> Any:
    """The library's record of a load."""
    from transformers.utils.loading_report import LoadStateDictInfo

    return LoadStateDictInfo(
        missing_keys=set(missing),
        unexpected_keys=set(unexpected),
        mismatched_keys=set(),
        error_msgs=[],
        conversion_errors={},
        skipped_pp_keys=set(),
    )


# Dtypes


def dtype_rule(model: Model, dtype: torch.dtype | None) -> Callable[[str], torch.dtype | None]:
    """Which dtype a name has though ``dtype`` is asked for; None for all others."""
    from transformers.core_model_loading import build_glob_alternation

    plan = model._get_dtype_plan(dtype) if dtype is not None else {}
    if not plan:
        return dict[str, torch.dtype]().get
    pattern, by_group, _ = build_glob_alternation(list(plan))

    def kept(name: str) -> torch.dtype | None:
        match = pattern.search(name)
        if match is None or match.lastgroup is None:
            return None
        found: torch.dtype = plan[by_group[match.lastgroup]]
        return found

    return kept


def settle_dtype(config: Any, dtype: torch.dtype | None, first_stored: torch.dtype) -> torch.dtype:
    """The dtype that ``from_pretrained`` would take; the configuration gets it.

    Args:
        config: the library's.
        dtype: as asked for, or None.
        first_stored: the dtype of the first stored floating-point tensor.
    """
    from transformers.modeling_utils import _get_dtype

    first = {"": torch.empty(0, dtype=first_stored, device="meta")}
    found: torch.dtype
    _, found = _get_dtype("auto" if dtype is None else dtype, None, config, None, first, True)
    return found


# Models


def auto_class(auto: Any, config: Any) -> tuple[Any, Any]:
    """The class that an Auto class takes for a configuration, and the part of it that it takes."""
    from transformers.models.auto import auto_factory

    if type(config) not in auto._model_mapping:
        raise ValueError(f"{auto.__name__} has no class for {type(config).__name__}")
    choose: Callable[..., Any] = auto_factory._get_model_class
    model_class = choose(config, auto._model_mapping)
    text_class = config.sub_configs.get("text_config")
    if text_class is not None and getattr(model_class, "config_class", None) == text_class:
        config = config.get_text_config()
    return model_class, config


def built(model_class: Any, config: Any, dtype: torch.dtype) -> Model:
    """An empty model on meta, tied, built as ``from_pretrained`` builds it."""
    from transformers.monkey_patching import patch_output_recorders

    with ExitStack() as stack:
        for context in model_class.get_init_context(dtype, False, False, False):
            stack.enter_context(context)
        model = model_class(deepcopy(config))
        patch_output_recorders(model)
    model.tie_weights(recompute_mapping=False)
    return model


def finish(
    model: Model,
    *,
    missing: Collection[str],
    device_of: Callable[[str], str],
) -> None:
    """Do to a model whose weights are in what ``from_pretrained`` does then.

    Buffers are computed, and what is missing is initialised.

    Args:
        model: with every loaded tensor in its place.
        missing: persistent names without values, tied names aside that have some.
        device_of: the device that a name belongs on.
    """
    lacking = set(missing)
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name not in lacking and isinstance(tensor, torch.Tensor):
            tensor._is_hf_initialized = True  # type: ignore[attr-defined]
            if isinstance(tensor, nn.Parameter) and tensor.is_floating_point():
                tensor.requires_grad_(True)
    names = [*lacking, *(name for name, _ in model.named_non_persistent_buffers())]
    with quiet_logs("transformers"):
        devices = {name: device_of(name) for name in names}
        model._move_missing_keys_from_meta_to_device(lacking, devices or None, None, None)
        # What is missing with all its tied names is now an object of its own under the first.
        model.mark_tied_weights_as_initialized(_info(missing))
        model._initialize_missing_keys(False)
        model.tie_weights(recompute_mapping=False)
    model.eval()
    model.set_use_kernels(False, None)


def set_generation(model: Model, folder: str) -> None:
    """Have the model generate as the folder's files say, where it can generate."""
    if model.can_generate() and hasattr(model, "adjust_generation_fn"):
        with quiet_logs("transformers"):
            model.adjust_generation_fn(
                *(None, False, None, folder),
                cache_dir=None,
                force_download=False,
                proxies=None,
                local_files_only=True,
                token=None,
                revision=None,
                subfolder="",
                trust_remote_code=False,
            )


# Back to published names


def unsaved(model: Model, held: Collection[str]) -> set[str]:
    """Names that the library leaves out when it saves: of ties, and what it computes anew.

    Args:
        model: of the library.
        held: the names that have values; a tied one is left out for the sake of another.
    """
    ties: Mapping[str, str] = getattr(model, "all_tied_weights_keys", {})
    tied = {name for name, kept in ties.items() if kept in held}
    return tied | set(model._keys_to_ignore_on_save or ())


def reverted(model: Model, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Tensors under published names, in the library's order."""
    from transformers.core_model_loading import revert_weight_conversion

    found: dict[str, Any] = revert_weight_conversion(model, dict(tensors))
    return found
