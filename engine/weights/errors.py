"""What can be wrong with a checkpoint directory. Every message says what is wrong and what to do next."""

from __future__ import annotations


class CheckpointError(Exception):
    """A model directory cannot be served as it is."""


class MissingCheckpoint(CheckpointError):
    """The directory or its ``config.json`` is not there."""


class BadConfig(CheckpointError):
    """``config.json`` is unreadable, incomplete or asks for something that is not supported."""


class UnknownArchitecture(CheckpointError):
    """``model_type`` names an architecture that is not supported."""


class MissingShard(CheckpointError):
    """No weights at all, or a file named by the index is absent."""


class BrokenShard(CheckpointError):
    """A weights file is truncated or is no safetensors file."""


class MissingTensor(CheckpointError):
    """A tensor the architecture needs is in none of the files."""


class WrongTensor(CheckpointError):
    """A tensor has another shape or dtype than the configuration implies."""
