"""A process that writes what it is told to, line by line: one of two that write to one place.

``python -m tests.support.writer`` reads a JSON object a line and answers with one: what was said
of the writing. Its process id is 1 where it is the first of a namespace of its own.
"""

import json
import os
import sys
import time

import torch

import streamload
from streamload.core.report import ExportReport
from streamload.downloading.fetching import fetch
from streamload.synthesis import synthesize, synthesize_neox_raw

DTYPES = ("float32", "bfloat16")


def convert(source, target, which):
    return streamload.convert(source, target, dtype=DTYPES[which])


def one_file(source, target, which):
    return streamload.convert(source, f"{target}/x.safetensors", dtype=DTYPES[which])


def sharded(source, target, which):
    bound = (60_000, 90_000)[which]
    return streamload.convert(source, target, dtype=DTYPES[which], max_shard_bytes=bound)


def either(source, target, which):
    """Shards or one file: who comes last decides whether there is an index."""
    return (convert, sharded)[which](source, target, which)


def export(source, target, which):
    return streamload.export(streamload.load(source, dtype=DTYPES[which]).model, target)


def cached(source, target, which):
    del which  # an entry of its own for each dtype: here both make the same
    os.environ["STREAMLOAD_CACHE"] = target
    return streamload.load(source, dtype="bfloat16", cache=True).report


def synth(source, target, which):
    del source
    return synthesize("gpt2-tiny", target, seed=which, force=True)


def synth_raw(source, target, which):
    del source
    sizes = {"layers": 1, "hidden": 64, "vocab_size": 320}
    return synthesize_neox_raw(target, seed=which, force=True, **sizes)


def download(source, target, which):
    del source
    fetch(f"{os.environ['WRITER_URL']}/{which}", f"{target}/x.bin", pause_s=0.01)
    return ExportReport(target, files=("x.bin",))


OPERATIONS = {
    work.__name__: work
    for work in (convert, one_file, sharded, either, export, cached, synth, synth_raw, download)
}


def answer(task):
    os.environ["WRITER_URL"] = task["url"]
    time.sleep(task["delay_s"])
    start_s = time.monotonic()
    try:
        report = OPERATIONS[task["operation"]](task["source"], task["target"], task["which"])
        said = {"error": "", "notices": list(report.notices), **report.to_dict()}
    except streamload.StreamloadError as error:
        said = {"error": str(error), "notices": []}
    return {**said, "start_s": start_s, "end_s": time.monotonic()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({"process": os.getpid()}), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
