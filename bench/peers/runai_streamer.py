"""Run:ai Model Streamer: native threads fill one buffer, tensors come as they are complete."""

from typing import Any

LABEL = "Run:ai streamer"
DELIVERS = "tensors, stored layout"
IMPORTS = ("torch", "runai_model_streamer")


def load(job: Any) -> Any:
    from runai_model_streamer import SafetensorsStreamer

    names = set(job.entries)
    found = {}
    with SafetensorsStreamer() as streamer:
        for file in job.files:
            streamer.stream_file(file)
            for name, tensor in streamer.get_tensors():
                if name in names:  # the buffer is used again: copy or cast out
                    found[name] = job.cast(tensor, copy=True)
    return found
