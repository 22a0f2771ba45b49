"""``verify``: reads everything once; counts odd values, checks digests, compares checkpoints."""

from streamload.verifying.verification import VerifyReport, verify

__all__ = ["VerifyReport", "verify"]
