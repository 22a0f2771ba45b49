"""What people pass to other libraries, and what it is called here."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from streamload.core.wording import suggestion

_INT8 = "quantize='int8' is what there is; files that are quantised already are decoded"
_NO_CODE = "no code from a checkpoint is ever run"
_HUB = "set HF_TOKEN and HF_HOME, as the hub's own tools read them"
_OFFLOAD = "mode='map' runs models larger than memory from their file"
_READ = "it is called workers here"
_ANSWERS = {
    "torch_dtype": "it is called dtype here",
    "precision": "it is called dtype here",
    "device_map": "it is called device here: one device, or a dict of module prefix → device",
    "map_location": "it is called device here",
    "max_memory": "what does not fit is refused (check_memory); mode='map' runs larger models",
    "low_cpu_mem_usage": "every load takes little more memory than the model: leave it out",
    "trust_remote_code": _NO_CODE,
    "weights_only": f"leave it out: {_NO_CODE}",
    "load_in_8bit": _INT8,
    "load_in_4bit": _INT8,
    "quantization_config": _INT8,
    "quantization": _INT8,
    "mmap": "it is called mode here: mode='map'",
    "backend": "it is called mode here: 'stream', 'map' or 'auto'",
    "assign": "meta parameters get new tensors, those that hold data are overwritten",
    "tie_weights": "ties of the module are kept: leave it out",
    "ignore_mismatched_sizes": "strict=False leaves what does not fit",
    "revision": "say it in the path: hf:ORG/NAME@REVISION",
    "subfolder": "say it in the path",
    "variant": "say it in the path: name the file or its index",
    "use_safetensors": "the path decides: name the file you mean",
    "cache_dir": _HUB,
    "token": _HUB,
    "use_auth_token": _HUB,
    "local_files_only": "nothing is fetched for hf:ORG/NAME but with download=False: leave it out",
    "force_download": "streamload download fetches anew",
    "offload_folder": _OFFLOAD,
    "offload_state_dict": _OFFLOAD,
    "offload_buffers": _OFFLOAD,
    "attn_implementation": "call set_attn_implementation of the loaded model",
    "num_threads": _READ,
    "num_workers": _READ,
    "max_workers": _READ,
    "concurrency": _READ,
    "threads": _READ,
    "chunk_size": "it is called chunk_bytes here",
    "buffer_size": "it is called chunk_bytes here",
    "block_size": "it is called chunk_bytes here",
    "memory_limit": "ring_bytes bounds the host memory of a load to a device",
    "verbose": "progress=True shows a bar; the report says the rest",
    "show_progress": "it is called progress here",
    "lora": "it is called adapter here",
    "adapter_name_or_path": "it is called adapter here",
    "peft_model_id": "it is called adapter here",
    "key_mapping": "load_transformers takes it; load_into takes mapping",
    "mapping": "it is for load_into and load_state_dict; load builds the model that it names",
    "cls": "it is for load_transformers",
    "model_class": "load_transformers takes cls",
    "config": "config.json beside the weights is read; for another one build the module, load_into",
    "model": "load_into(module, path) fills a module of your own",
    "max_shard_size": "it is called max_shard_bytes here, in bytes",
    "safe_serialization": "safetensors is what is written: leave it out",
    "save_directory": "it is called path here",
    "save_path": "it is called path here",
    "do_sample": "a temperature above 0 draws",
    "max_length": "it is called max_new_tokens here, without the prompt",
    "max_tokens": "it is called max_new_tokens here",
    "eos_token_id": "it is called stop_token here",
    "input_ids": "it is called ids here",
}


def answer_to(name: str, known: Iterable[str] = ()) -> str:
    """``: it is called dtype here``, or a known name that is close, or nothing."""
    key = name.replace("-", "_").lstrip("_").lower()
    answer = _ANSWERS.get(key)
    return f": {answer}" if answer is not None else suggestion(name, known)


def unknown_options(names: Collection[str], known: Iterable[str]) -> str:
    """One line on options that there are not, with what each is called here."""
    known = list(known)
    told = "; ".join(f"{name!r}{answer_to(name, known)}" for name in names)
    return f"unknown option{'s' if len(names) > 1 else ''} {told}"
