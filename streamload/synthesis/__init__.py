"""Made-up checkpoints in published layouts, for tests, measurements and first tries."""

from streamload.synthesis.neox_raw import synthesize_neox_raw
from streamload.synthesis.presets import PRESETS
from streamload.synthesis.writing import SynthesisReport, synthesize

__all__ = ["PRESETS", "SynthesisReport", "synthesize", "synthesize_neox_raw"]
