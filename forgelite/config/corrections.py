"""Corrections for samples that another policy drew: the entries of `loss.corrections`.

A correction is a factor for each token, made from the gap between the policy that is trained and the one that sampled,
without gradient. Those that *weigh* are importance weights: they make up for the gap. The others only leave out what
lies too far off. All factors of a list are multiplied, and each is computed from all trained tokens, so the order of
the list does not matter. One class a correction; its function has the same name in `forgelite/losses/corrections.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from forgelite.config.section import Section

LARGEST_WEIGHT = 22026.0
"""e^10: log-ratios are held within +-10 before `exp`, so no larger weight exists."""


_NAME = (
    "which correction: token_tis, sequence_tis, geometric_tis, segment_tis, icepop, sequence_mis, "
    "geometric_rejection, veto, opsm, custom"
)


class _Correction(Section):
    name: str

    @property
    def label(self) -> str:
        """What it is called in metrics."""
        return self.name

    def options(self) -> dict[str, Any]:
        """The keyword arguments of the function."""
        return {key: getattr(self, key) for key in type(self).model_fields if key != "name"}


class _Capped(_Correction):
    cap: float = Field(2.0, gt=0, le=LARGEST_WEIGHT, description="the largest importance weight; above it: truncated")


class _Banded(_Correction):
    low: float = Field(0.5, ge=0, le=1, description="the smallest ratio that stays")
    high: float = Field(2.0, ge=1, le=LARGEST_WEIGHT, description="the largest ratio that stays")


class TokenTIS(_Capped):
    """Truncated importance sampling, token by token."""

    weighs: ClassVar[bool] = True
    by_sequence: ClassVar[bool] = False

    name: Literal["token_tis"] = Field(default="token_tis", description=_NAME)


class SequenceTIS(_Capped):
    """Truncated importance sampling with the product of a sequence's ratios."""

    weighs: ClassVar[bool] = True
    by_sequence: ClassVar[bool] = True

    name: Literal["sequence_tis"] = Field(default="sequence_tis", description=_NAME)
    cap: float = Field(5.0, gt=0, le=LARGEST_WEIGHT, description="the largest importance weight; above it: truncated")


class GeometricTIS(_Capped):
    """Truncated importance sampling with the geometric mean of a sequence's ratios."""

    weighs: ClassVar[bool] = True
    by_sequence: ClassVar[bool] = True

    name: Literal["geometric_tis"] = Field(default="geometric_tis", description=_NAME)


class SegmentTIS(_Capped):
    """Truncated importance sampling with the geometric mean over each turn."""

    weighs: ClassVar[bool] = True
    by_sequence: ClassVar[bool] = False

    name: Literal["segment_tis"] = Field(default="segment_tis", description=_NAME)


class IcePop(_Banded):
    """Masked importance sampling: a token whose ratio is out of bounds is left out, the others are weighed."""

    weighs: ClassVar[bool] = True
    by_sequence: ClassVar[bool] = False

    name: Literal["icepop"] = Field(default="icepop", description=_NAME)
    high: float = Field(5.0, ge=1, le=LARGEST_WEIGHT, description="the largest ratio that stays")


class SequenceMIS(_Banded):
    """Masked importance sampling with the product of a sequence's ratios."""

    weighs: ClassVar[bool] = True
    by_sequence: ClassVar[bool] = True

    name: Literal["sequence_mis"] = Field(default="sequence_mis", description=_NAME)


class GeometricRejection(_Banded):
    """A sequence whose geometric mean ratio is out of bounds is left out; nothing is weighed."""

    weighs: ClassVar[bool] = False
    by_sequence: ClassVar[bool] = True

    name: Literal["geometric_rejection"] = Field(default="geometric_rejection", description=_NAME)
    low: float = Field(0.99, ge=0, le=1, description="the smallest ratio that stays")
    high: float = Field(1.01, ge=1, le=LARGEST_WEIGHT, description="the largest ratio that stays")


class Veto(_Correction):
    """A sequence with one token that the trained policy would hardly ever choose is left out."""

    weighs: ClassVar[bool] = False
    by_sequence: ClassVar[bool] = True

    name: Literal["veto"] = Field(default="veto", description=_NAME)
    lowest: float = Field(
        1e-4, gt=1 / LARGEST_WEIGHT, lt=1, description="a sequence with a token below this ratio is left out"
    )


class OPSM(_Correction):
    """Off-policy sequence mask: a sequence with negative advantage that the policy has moved away from is left out."""

    weighs: ClassVar[bool] = False
    by_sequence: ClassVar[bool] = True

    name: Literal["opsm"] = Field(default="opsm", description=_NAME)
    threshold: float = Field(
        0.1, ge=0, description="most drift of a sequence with negative advantage, in nats per token"
    )


class CustomCorrection(_Correction):
    """A function of the user; `forgelite.losses.tokens` says what it takes and gives."""

    name: Literal["custom"] = Field(default="custom", description=_NAME)
    path: str = Field(description="module:function of a correction of one's own")
    arguments: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of that function")
    weighs: bool = Field(description="whether that function gives importance weights, or only leaves tokens out")
    by_sequence: bool = Field(False, description="whether it gives the same factor to all tokens of a sequence")

    @property
    def label(self) -> str:
        """The name of the function."""
        return self.path.rpartition(":")[2]

    def options(self) -> dict[str, Any]:
        """The keyword arguments of the function."""
        return dict(self.arguments)


def _name(value: Any) -> Any:  # pydantic hands over whatever the user wrote, or a finished config
    return value.get("name") if isinstance(value, Mapping) else getattr(value, "name", None)


CorrectionConfig = Annotated[
    Annotated[TokenTIS, Tag("token_tis")]
    | Annotated[SequenceTIS, Tag("sequence_tis")]
    | Annotated[GeometricTIS, Tag("geometric_tis")]
    | Annotated[SegmentTIS, Tag("segment_tis")]
    | Annotated[IcePop, Tag("icepop")]
    | Annotated[SequenceMIS, Tag("sequence_mis")]
    | Annotated[GeometricRejection, Tag("geometric_rejection")]
    | Annotated[Veto, Tag("veto")]
    | Annotated[OPSM, Tag("opsm")]
    | Annotated[CustomCorrection, Tag("custom")],
    Discriminator(_name),
]
"""The type of an entry of `loss.corrections`, chosen by its `name`."""
