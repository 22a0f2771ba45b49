"""What ``adapter_config.json`` says, read as data: nothing in it is imported, run or looked up.

Fields and their meaning: https://huggingface.co/docs/peft/package_reference/lora#peft.LoraConfig
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from streamload.core.errors import CheckpointError
from streamload.core.wording import printable

# Settings under which the merged weight is not W + scale x B A, or W is not the base's.
_OTHER_MATHS = {
    "use_qalora": "QA-LoRA pools its inputs",
    "use_bdlora": "BD-LoRA's factors are block diagonal",
    "arrow_config": "Arrow chooses between adapters by input",
    "kasa_config": "KaSA changes the base weights",
    "monteclora_config": "MonteCLoRA samples its factors",
    "velora_config": "VeLoRA has tensors of its own",
    "layer_replication": "layers of the base are repeated",
    "alora_invocation_tokens": "it acts from certain tokens on, and cannot be merged",
}
# Initialisations after which the base weights are others, as far as the file was saved with them.
_OTHER_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_MOST = 1e30  # what float32 still holds, also as a scale
_T = TypeVar("_T")
_BIASES = ("none", "all", "lora_only")
_SHOWN = 80


@dataclass(frozen=True)
class AdapterSettings:
    """What the merge needs of a configuration of ``peft_type`` LORA.

    Attributes:
        rank, alpha: where no pattern says otherwise.
        ranks, alphas: pattern → value, in the order they are tried.
        layers: the only layers that are adapted; None for all.
        named: modules that ``target_modules`` has by their full names, whatever their layer is.
        layer_patterns: what a layer's number follows, in the order they are tried; any name if
            there are none.
        token_indices: the embedding's name (``""``: the input embedding) → which rows are trained.
    """

    rank: int = 8
    alpha: float = 8
    ranks: tuple[tuple[str, int], ...] = ()
    alphas: tuple[tuple[str, float], ...] = ()
    use_rslora: bool = False
    use_dora: bool = False
    fan_in_fan_out: bool = False
    modules_to_save: tuple[str, ...] = ()
    target_parameters: tuple[str, ...] = ()
    layers: tuple[int, ...] | None = None
    named: tuple[str, ...] = ()
    layer_patterns: tuple[str, ...] = ()
    token_indices: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def rank_of(self, module: str) -> int:
        """The rank of a module, or of a parameter, by its full name."""
        return _by_pattern(self.ranks, module, self.rank)

    def scale_of(self, module: str) -> float:
        """What its product is multiplied by."""
        rank = self.rank_of(module)
        alpha = _by_pattern(self.alphas, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def leaves_out(self, module: str) -> bool:
        """True if PEFT would leave a module out by ``layers_to_transform``, as its tuners do."""
        if self.layers is None or module in self.named:
            return False
        patterns = self.layer_patterns or (r"[^.]*",)
        starts = r".*?\." if not self.layer_patterns else r"(?:^|.*?\.)"
        for pattern in patterns:
            found = re.match(rf"{starts}{pattern}\.(?P<idx>\d+)\.", module)
            if found is not None:
                return int(found["idx"][:9]) not in self.layers
        return True

    def is_saved_whole(self, name: str) -> bool:
        """True if a tensor belongs to one of ``modules_to_save``."""
        modules = {f".{name}"[: at.start()] for at in re.finditer(r"\.", f".{name}")}
        return any(
            m == f".{saved}" or m.endswith(f".{saved}")
            for m in modules
            for saved in self.modules_to_save
        )

    def indices_of(self, module: str) -> tuple[int, ...]:
        """Which rows of an embedding are trained, in the order they are stored."""
        for name, indices in self.token_indices:
            if not name or module == name or module.endswith(f".{name}"):
                return indices
        return ()


def _by_pattern(patterns: tuple[tuple[str, _T], ...], module: str, default: _T) -> _T:
    """PEFT's rule: the first pattern that ends the name, after a point or as a whole."""
    for pattern, value in patterns:
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def settings_from_config(config: Mapping[str, Any], path: str) -> AdapterSettings:
    """Check a configuration.

    Args:
        config: as in ``adapter_config.json``.
        path: of the file, for messages.

    Raises:
        CheckpointError: another kind of adapter, or a field that is not what PEFT writes.
    """
    kind = config.get("peft_type")
    if kind != "LORA":
        what = f"of the kind {printable(str(kind))[:_SHOWN]}" if kind else "without peft_type"
        raise CheckpointError(f"an adapter {what}; LORA is what can be merged", path=path)
    for field, why in _OTHER_MATHS.items():
        if config.get(field):
            raise CheckpointError(f"{field} is set ({why}): it cannot be merged here", path=path)
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_OTHER_BASE):
        raise CheckpointError(
            f"init_lora_weights is {start[:_SHOWN]!r}: it belongs to base weights that were "
            "changed when training began; save it with path_initial_model_for_weight_conversion, "
            "which makes it one for the base model",
            path=path,
        )
    try:
        return _read(config)
    except ValueError as error:
        raise CheckpointError(str(error), path=path) from error


def _read(config: Mapping[str, Any]) -> AdapterSettings:
    if (bias := config.get("bias") or "none") not in _BIASES:
        raise ValueError(f"bias must be one of {_BIASES}, not {_short(bias)}")
    return AdapterSettings(
        rank=_rank("r", config.get("r", 8)),
        alpha=_number("lora_alpha", config.get("lora_alpha", 8)),
        ranks=tuple(
            (_pattern("rank_pattern", k), _rank(k, v)) for k, v in _items(config, "rank_pattern")
        ),
        alphas=tuple(
            (_pattern("alpha_pattern", k), _number(k, v))
            for k, v in _items(config, "alpha_pattern")
        ),
        use_rslora=_flag(config, "use_rslora"),
        use_dora=_flag(config, "use_dora"),
        fan_in_fan_out=_flag(config, "fan_in_fan_out"),
        modules_to_save=_names(config, "modules_to_save"),
        target_parameters=_names(config, "target_parameters"),
        layers=(layers := _layers(config)),
        named=() if layers is None else _names(config, "target_modules"),
        layer_patterns=_layer_patterns(config),
        token_indices=_indices(config.get("trainable_token_indices")),
    )


def _layers(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    value = config.get("layers_to_transform")
    if value is None or value == []:
        if config.get("layers_pattern"):
            raise ValueError("layers_pattern needs layers_to_transform")
        return None
    if isinstance(config.get("target_modules"), str):
        raise ValueError("layers_to_transform needs a list of target_modules, not a pattern")
    layers = value if isinstance(value, list) else [value]
    if any(type(layer) is not int or layer < 0 for layer in layers):
        raise ValueError(f"layers_to_transform must be numbers of layers: {_short(value)}")
    return tuple(layers)


def _layer_patterns(config: Mapping[str, Any]) -> tuple[str, ...]:
    value = config.get("layers_pattern")
    names = [value] if isinstance(value, str) and value else value
    return tuple(
        _pattern("layers_pattern", name)
        for name in _names({"layers_pattern": names}, "layers_pattern")
    )


def _items(config: Mapping[str, Any], field: str) -> list[tuple[str, Any]]:
    value = config.get(field) or {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{field} must be an object, not {_short(value)}")
    return list(value.items())


def _rank(field: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(
            f"the rank {field!r} must be a whole number of at least 1: {_short(value)}"
        )
    return value


def _number(field: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < _MOST:
        raise ValueError(f"{field!r} must be a number below {_MOST:g}: {_short(value)}")
    return value


def _flag(config: Mapping[str, Any], field: str) -> bool:
    value = config.get(field) or False
    if not isinstance(value, bool):
        raise ValueError(f"{field!r} must be true or false: {_short(value)}")
    return value


def _names(config: Mapping[str, Any], field: str) -> tuple[str, ...]:
    value = config.get(field) or []
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"{field!r} must be a list of names: {_short(value)}")
    return tuple(value)


def _indices(value: object) -> tuple[tuple[str, tuple[int, ...]], ...]:
    found: Mapping[str, Any] = value if isinstance(value, Mapping) else {"": value or []}
    for rows in found.values():
        if not isinstance(rows, list) or any(type(n) is not int or n < 0 for n in rows):
            raise ValueError(f"trainable_token_indices must be lists of rows: {_short(value)}")
    return tuple((str(name), tuple(rows)) for name, rows in found.items() if rows)


def _pattern(field: str, text: str) -> str:
    """A regular expression that cannot take long, whatever name it is tried on.

    Repeats inside of repeats take exponentially long, several in a row a power of the name's
    length: three are allowed, and none of a group.
    """
    bare = re.sub(r"\\.|\[[^\]]*\]", "x", text)
    if len(text) > 500 or len(re.findall(r"[*+{]", bare)) > 3 or re.search(r"\)[*+{?]", bare):
        raise ValueError(f"{field}: {_short(text)} is too intricate a pattern")
    if re.search(r"\\[1-9]|\(\?P=", text):
        raise ValueError(f"{field}: {_short(text)} refers back to groups")
    try:
        re.compile(rf"(.*\.)?({text})$")
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{field}: {_short(text)} is no pattern: {error}") from error
    return text


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
