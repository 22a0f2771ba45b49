"""The process in which the ``tokenizers`` package runs: it reads requests and answers them.

A tokenizer's file is anybody's: a regular expression in it can take for ever, a table of it any
amount of memory, and an error inside the package can end the process. Here that ends this process
and no other. One JSON object a line each way; ``None`` is the file.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import suppress
from typing import Any


def serve() -> None:
    """Answer requests until there are no more."""
    with suppress(ValueError, OSError):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's affair
    out, sys.stdout = sys.stdout, open(os.devnull, "w")  # noqa: SIM115  # nothing else may answer
    backend: Any = None
    import tokenizers

    for line in sys.stdin:
        request = json.loads(line)
        try:
            _allow(request["cpu_s"])
            if request["do"] == "load":
                _allow_memory(request["built_bytes"])
                backend = _loaded(tokenizers, request["files"])
                answer = backend.get_vocab_size(with_added_tokens=True)
            elif request["do"] == "encode":
                answer = list(map(int, backend.encode(request["what"]).ids))
            else:
                answer = str(backend.decode(request["what"], skip_special_tokens=True))
            reply = {"answer": answer}
        except BaseException as error:  # a panic of the package is no Exception
            reply = {"error": str(error)[:1000] or type(error).__name__}
        out.write(json.dumps(reply) + "\n")
        out.flush()


def _loaded(tokenizers: Any, files: list[str]) -> Any:
    """One file is a ``tokenizer.json``, two are a vocabulary and its merges."""
    if len(files) == 1:
        with open(files[0], "rb") as file:
            return tokenizers.Tokenizer.from_buffer(file.read())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(*files))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    end = "<|endoftext|>"
    if backend.token_to_id(end) is not None:
        backend.add_special_tokens([end])
    return backend


def _allow(cpu_s: float) -> None:
    """End this process when it has computed for so long; where there are no such timers, the
    parent does.
    """
    with suppress(AttributeError, OSError):
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, cpu_s)


def _allow_memory(nbytes: int) -> None:
    """No more memory than now, and ``nbytes`` (Linux)."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with open("/proc/self/status") as file:
            held = next(int(line.split()[1]) << 10 for line in file if line.startswith("VmData:"))
        resource.setrlimit(resource.RLIMIT_DATA, (held + nbytes, held + nbytes))
