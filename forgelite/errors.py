"""Every exception that forgelite raises, in one small hierarchy.

An error names the offending value, the limit, and the way out. Which word is used matters, because each
has a counter of its own: a request is *rejected* before it starts, a sample *fails*, a station *dies*.
"""

from __future__ import annotations


class ForgeliteError(Exception):
    """The root of forgelite's own errors."""


class ConfigError(ForgeliteError):
    """The configuration, or what it points at, is wrong. The message names the keys. Apps exit with code 2."""


class RequestRejected(ForgeliteError):
    """The policy refuses one request (empty prompt, unknown token id, too long); the engine lives on."""


class GenerationFailed(ForgeliteError):
    """One request ended without a completion (aborted, past its deadline, engine fault)."""


class ScoringFailed(ForgeliteError):
    """A scorer raised, timed out or returned something that is not a finite number."""


class WeightError(ForgeliteError):
    """A version could not be published or fetched; the version that was served before is still whole."""


class VersionUnavailable(WeightError):
    """The version asked for was never committed, or has been dropped by `retain`."""


class WeightMismatch(WeightError):
    """Names, shapes, dtypes or the fingerprint differ between the two ends. The message lists them."""


class TrainingDiverged(ForgeliteError):
    """The loss or the gradient norm is not finite; the parameters were not changed."""


class DeadlineExceeded(ForgeliteError):
    """A wait ended at its deadline. The message names the gate, what it holds and who holds it."""


class StationDied(ForgeliteError):
    """The process behind a station is gone or does not answer. The message holds the cause."""
