"""A process of its own for a package that works on what a checkpoint brings.

It has so much time and memory as there is cause for, and what happens to it happens to no other.

``answering`` is the child's side: one JSON object a line each way.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from streamload.core.errors import CheckpointError

_CODE = (
    "import sys; sys.path[:] = {path!r}\nfrom streamload.generation.{module} import serve; serve()"
)


class Child:
    """The parent's side: starts the process, asks it, and ends it with itself.

    Args:
        module: of this room, whose ``serve`` answers.
        path: the file that errors name.
    """

    def __init__(self, module: str, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._is_broken_off = False
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-c", _CODE.format(path=sys.path, module=module)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
        )
        weakref.finalize(self, _end, self.process)

    def ask(self, fault: str, *, cpu_s: float, **request: object) -> Any:
        """The answer to a request.

        Args:
            fault: how an error's message begins.
            cpu_s: how much processor time the answer may take.
            request: what ``serve`` is told.

        Raises:
            CheckpointError: there is none, or it takes more time or memory than it may.
        """
        process, timer = self.process, None
        assert process.stdin is not None
        assert process.stdout is not None
        with self._lock:
            if os.name == "nt":  # no timers of processor time there
                timer = threading.Timer(10 * cpu_s, process.kill)
                timer.start()
            try:
                if self._is_broken_off:
                    raise BrokenPipeError
                process.stdin.write(json.dumps({**request, "cpu_s": cpu_s}).encode() + b"\n")
                process.stdin.flush()
                line = process.stdout.readline()
            except BrokenPipeError:
                line = b""
            except BaseException:
                # Its answer may be in the pipe, and would be taken for the next one's.
                self._is_broken_off = True
                process.kill()
                raise
            finally:
                if timer is not None:
                    timer.cancel()
        if not line.endswith(b"\n"):
            process.kill()
            raise CheckpointError(
                f"{fault}it takes more time or memory than a file of its size should (an "
                "expression in it may have no end)",
                path=self._path,
            )
        reply = json.loads(line)
        if "error" in reply:
            raise CheckpointError(f"{fault}{reply['error']}", path=self._path)
        return reply["answer"]


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with suppress(OSError):  # what it has not read
            pipe.close()
    process.wait()


def answering(answer: Callable[[Mapping[str, Any]], object]) -> None:
    """The child's side: answer requests until there are no more."""
    with suppress(ValueError, OSError):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's affair
    out, sys.stdout = sys.stdout, open(os.devnull, "w")  # noqa: SIM115  # nothing else may answer
    for line in sys.stdin:
        request = json.loads(line)
        try:
            _allow(request["cpu_s"])
            reply = {"answer": answer(request)}
        except BaseException as error:  # a panic of a package is no Exception
            reply = {"error": str(error)[:1000] or type(error).__name__}
        out.write(json.dumps(reply) + "\n")
        out.flush()


def _allow(cpu_s: float) -> None:
    """End this process when it has computed for so long; where there are no such timers, the
    parent does.
    """
    with suppress(AttributeError, OSError):
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, cpu_s)


def allow_memory(nbytes: int) -> None:
    """In the child: no more memory than now, and ``nbytes`` (Linux)."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with open("/proc/self/status") as file:
            held = next(int(line.split()[1]) << 10 for line in file if line.startswith("VmData:"))
        resource.setrlimit(resource.RLIMIT_DATA, (held + nbytes, held + nbytes))
