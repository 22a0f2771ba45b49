"""The device as the checks see it; tests put a pretended one in its place."""

from __future__ import annotations

import shutil
import subprocess
import time
from typing import Any, Protocol


class Machine(Protocol):
    """A machine with a device.

    Attributes:
        device: as ``device=`` takes it.
        memory: where tensors are made beside a load; the same on a real one.
        others: more devices of the kind.
    """

    device: str
    memory: str
    others: tuple[str, ...]

    def facts(self) -> dict[str, str]:
        """What it is."""

    def synchronize(self) -> None:
        """Wait for all that is under way."""

    def allocated_bytes(self) -> int:
        """Device memory that tensors hold."""

    def free_bytes(self) -> int:
        """What can still be had, after what is kept for later was given back."""

    def fill(self, but_bytes: int) -> object:
        """Take all of the device's memory but so much, as long as what is returned lives."""

    def copy_s(self, nbytes: int, piece_bytes: int, *, pinned: bool) -> float:
        """Seconds that ``nbytes`` take from the host, ``piece_bytes`` at a time."""

    def keep_busy(self, milliseconds: float) -> None:
        """Queue work on the current stream that takes about so long."""

    def has_context(self, device: str) -> bool:
        """True if this process has anything on the device."""


class Cuda:
    """See Machine."""

    def __init__(self) -> None:
        import torch

        self.device = self.memory = "cuda:0"
        self.others = tuple(f"cuda:{i}" for i in range(1, torch.cuda.device_count()))

    @staticmethod
    def absent() -> str | None:
        """Why there is none, or None."""
        import torch

        if torch.version.cuda is None:
            return f"torch {torch.__version__} was built without CUDA"
        return None if torch.cuda.is_available() else "torch sees no CUDA device"

    def facts(self) -> dict[str, str]:
        import torch

        about = torch.cuda.get_device_properties(0)
        found = {
            "device": about.name,
            "device memory": f"{about.total_memory / 2**30:.1f} GiB",
            "torch": f"{torch.__version__}, CUDA {torch.version.cuda}",
        }
        asked = "driver_version,pcie.link.gen.current,pcie.link.width.current"
        if shutil.which("nvidia-smi"):
            command = ["nvidia-smi", "-i", "0", f"--query-gpu={asked}", "--format=csv,noheader"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
            values = [value.strip() for value in done.stdout.strip().split(",")]
            if len(values) == 3:
                found["driver"] = values[0]
                found["link"] = f"PCIe gen {values[1]} x{values[2]}"
        return found

    def synchronize(self) -> None:
        import torch

        torch.cuda.synchronize(self.device)

    def allocated_bytes(self) -> int:
        import torch

        return torch.cuda.memory_allocated(self.device)

    def free_bytes(self) -> int:
        import torch

        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self.device)[0])

    def fill(self, but_bytes: int) -> object:
        import torch

        nbytes = max(self.free_bytes() - but_bytes, 0)
        return torch.empty(nbytes, dtype=torch.uint8, device=self.memory)

    def copy_s(self, nbytes: int, piece_bytes: int, *, pinned: bool) -> float:
        import torch

        slots = [torch.ones(piece_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(4)]
        target = torch.empty(piece_bytes * 4, dtype=torch.uint8, device=self.device)
        places = target.view(4, piece_bytes)
        for source, place in zip(slots, places, strict=True):
            place.copy_(source, non_blocking=True)
        self.synchronize()
        start_s = time.perf_counter()
        for number in range(-(-nbytes // piece_bytes)):
            places[number % 4].copy_(slots[number % 4], non_blocking=True)
        self.synchronize()
        return time.perf_counter() - start_s

    def keep_busy(self, milliseconds: float) -> None:
        import torch

        sleep: Any = torch.cuda._sleep
        sleep(int(milliseconds * 1e6))  # cycles, of which there are 1 to 2 a ns

    def has_context(self, device: str) -> bool:
        import torch

        made: Any = torch._C._cuda_hasPrimaryContext  # type: ignore[attr-defined]
        return bool(made(torch.device(device).index))
