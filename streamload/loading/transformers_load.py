"""``load_transformers``: a class of transformers, built without memory and streamed into."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from typing_extensions import Unpack

from streamload.adapters.opening import open_values
from streamload.core.options import LoadOptions, Settings, settings_from
from streamload.core.signatures import shows_options
from streamload.hf.distributed import distribute
from streamload.hf.library import set_generation
from streamload.hf.their_models import empty_model
from streamload.loading.building import Prepare
from streamload.loading.calls import Loaded
from streamload.loading.resolving import Job, resolve, with_default_dtype
from streamload.loading.running import plan_only, run
from streamload.module.commit import commit
from streamload.module.empty_weights import empty_weights
from streamload.module.joining import confirming, together
from streamload.planning.records import Plan
from streamload.sources.base import Source
from streamload.sources.config.companion_folder import config_folder


class TransformersOptions(LoadOptions, total=False):
    """Keyword arguments of ``load_transformers``: those of ``load``, and these.

    Attributes:
        key_mapping: regular expressions of stored names → what they become, before the
            library's own renames; as ``from_pretrained`` takes it.
        distributed_config: the library's DistributedConfig, or a dict of its fields: the model is
            laid out over all ranks as that library does, and loaded by all of them together.
    """

    key_mapping: Mapping[str, str] | None
    distributed_config: Any


@shows_options(TransformersOptions, mode="auto")
def load_transformers(
    path: str | os.PathLike[str], *, cls: Any = None, **options: Unpack[TransformersOptions]
) -> Loaded:
    """Build the transformers class for a checkpoint, and stream the weights in.

    The model is as ``from_pretrained`` leaves it (ties, buffers, dtypes, what is kept in
    float32, ``generation_config``, eval mode), at the cost of one model in memory. ``dtype=None``
    is the configuration's dtype, or else that of the first stored tensor. With ``strict=False``
    what is missing is initialised as that library does it, and listed.

    Args:
        path: see ``load``.
        cls: an Auto class or a model class; by default the one that ``architectures`` of
            ``config.json`` names.
        **options: see TransformersOptions.

    Returns:
        ``.model``, ``.report``, ``.config`` and ``.generation_config`` as dicts.

    Raises:
        MissingExtraError: transformers is not installed.
        StreamloadError: as ``load``.
    """
    values = dict(options)
    wanted = values.pop("distributed_config", None)
    settings, key_mapping = _settings(values)
    prepare = None if wanted is None else partial(distribute, config=wanted)
    return load_theirs_prepared(path, settings, cls, key_mapping, prepare)


def load_theirs_prepared(
    path: str | os.PathLike[str],
    settings: Settings,
    cls: Any = None,
    key_mapping: Mapping[str, str] | None = None,
    prepare: Prepare | None = None,
) -> Loaded:
    """As ``load_transformers``; ``prepare`` is called with the empty model, which it may shard."""
    with open_values(path, settings) as source:
        job = build_theirs(source, settings, cls, key_mapping, prepare)
        assert job.theirs is not None, "just built"
        model = job.theirs.model
        with together(model, settings.timeout_s) as ranks:
            finished = run(job, ranks, attaches=True)
            commit(model, finished.plan, finished.loaded, confirm=confirming(ranks))
        job.theirs.finish(finished.plan)
        with config_folder(source) as folder:
            set_generation(model, folder)
    if finished.larger is not None:
        finished.larger.attach(model)
    generation = getattr(model, "generation_config", None)
    return Loaded(
        model,
        finished.report,
        model.config.to_dict(),
        {} if generation is None else generation.to_diff_dict(),
    )


def plan_transformers(path: str | os.PathLike[str], **options: Unpack[TransformersOptions]) -> Plan:
    """What ``load_transformers`` would do; reads headers only."""
    settings, key_mapping = _settings(options)
    with open_values(path, settings) as source:
        return plan_only(build_theirs(source, settings, None, key_mapping), attaches=True)


def _settings(options: Mapping[str, Any]) -> tuple[Settings, Mapping[str, str] | None]:
    values = dict(options)
    key_mapping = values.pop("key_mapping", None)
    if values.get("trust_remote_code") in (None, False):
        values.pop("trust_remote_code", None)
    if values.get("layers") is not None:
        raise ValueError("load_transformers builds whole models: layers= is for load and load_into")
    if key_mapping is not None:
        if not isinstance(key_mapping, Mapping):
            raise TypeError(
                f"key_mapping must be a dict of regular expressions, not {key_mapping!r}"
            )
        for pattern in key_mapping:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"key_mapping: {pattern!r} is no pattern: {error}") from error
    return settings_from(values, mode="auto"), key_mapping


def build_theirs(
    source: Source,
    settings: Settings,
    cls: Any = None,
    key_mapping: Mapping[str, str] | None = None,
    prepare: Prepare | None = None,
) -> Job:
    """The empty model of transformers for a checkpoint, as the job of loading it.

    Raises:
        MissingExtraError: transformers is not installed.
        CheckpointError: there is no configuration, or no class for it.
        PlanError: no model can be built of it.
    """
    file_config, notices = source.config()
    settings = with_default_dtype(source, settings)
    with empty_weights(), config_folder(source) as folder:
        theirs = empty_model(
            file_config or {},
            source.catalog,
            settings.dtype,
            folder=folder,
            path=source.path,
            cls=cls,
            key_mapping=key_mapping,
        )
    model = theirs.model
    if prepare is not None:
        device = prepare(model)
        if isinstance(device, str) and settings.device == "cpu":
            settings = replace(settings, device=device)
    return resolve(source, model, settings, file_config, notices=notices, theirs=theirs)
