"""What can go wrong between an ONNX file and a bundle; each prints as one line and exits with 2."""

from __future__ import annotations

from targets.errors import TightfitError


class ModelError(TightfitError):
    """The source model cannot be read, is unsafe, or holds something that cannot be compiled."""


class OptionError(TightfitError):
    """A command-line option does not fit the model or the board."""


class DataError(TightfitError):
    """Calibration or verification data cannot be read, or does not fit the model's inputs."""


class VerificationError(TightfitError):
    """What was compiled does not load, does not run, or differs from the source model."""
