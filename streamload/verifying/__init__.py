"""``verify``: reads everything once; counts odd values, checks digests, compares checkpoints."""

from streamload.verifying.verification import verify
from streamload.verifying.verify_report import VerifyReport

__all__ = ["VerifyReport", "verify"]
