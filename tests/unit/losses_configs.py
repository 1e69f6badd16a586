"""One configuration for every loss and every correction, with bounds that some of the test's tokens cross."""

from __future__ import annotations

from forgelite.config import corrections, loss
from forgelite.config.policy_loss import PolicyLossConfig

SURROGATES: dict[str, PolicyLossConfig] = {
    config.name: config
    for config in (
        loss.ReinforceLossConfig(),
        loss.ClipLossConfig(),
        loss.GRPOLossConfig(),
        loss.DrGRPOLossConfig(constant_length=16),
        loss.DAPOLossConfig(),
        loss.DecoupledPPOLossConfig(clip_low=0.05, clip_high=0.05),
        loss.ReinforcePlusPlusLossConfig(),
        loss.DualClipLossConfig(clip_low=0.1, clip_high=0.1, dual_clip=1.2),
        loss.CISPOLossConfig(clip_low=0.3, clip_high=0.3),
        loss.GSPOLossConfig(clip_low=0.05, clip_high=0.05),
        loss.GMPOLossConfig(clip_low=0.2, clip_high=0.2),
        loss.SAPOLossConfig(tau_positive=1.0, tau_negative=2.0),
        loss.TOPRLossConfig(weight_positive=0.7, weight_negative=1.3),
        loss.KimiLossConfig(),
        loss.DPPOTVLossConfig(threshold_low=0.02, threshold_high=0.02),
        loss.DPPOKLLossConfig(threshold_low=0.005, threshold_high=0.005),
        loss.IPOLossConfig(threshold=0.02, kl_tau=0.1),
    )
}

CORRECTIONS: dict[str, corrections.CorrectionConfig] = {
    correction.name: correction
    for correction in (
        corrections.TokenTIS(cap=1.2),
        corrections.SequenceTIS(cap=1.5),
        corrections.GeometricTIS(cap=1.05),
        corrections.SegmentTIS(cap=1.1),
        corrections.IcePop(low=0.8, high=1.3),
        corrections.SequenceMIS(low=0.5, high=2.0),
        corrections.GeometricRejection(low=0.9, high=1.1),
        corrections.Veto(lowest=0.5),
        corrections.OPSM(threshold=0.05),
    )
}


def corrected(correction: corrections.CorrectionConfig) -> PolicyLossConfig:
    """A loss that may carry the correction."""
    return loss.ReinforceLossConfig(corrections=[correction])


ALL: dict[str, PolicyLossConfig] = {
    **SURROGATES,
    **{f"reinforce with {name}": corrected(correction) for name, correction in CORRECTIONS.items()},
    "gspo, decoupled, with sequence_tis and opsm": loss.GSPOLossConfig(
        anchor="proximal", corrections=[corrections.SequenceTIS(), corrections.OPSM(threshold=0.05)], kl_coefficient=0.1
    ),
    "clip, sequence mean, unbiased KL": loss.ClipLossConfig(
        aggregation="sequence_mean",
        kl_coefficient=0.2,
        kl_estimator="k3_unbiased",
        corrections=[corrections.Veto(lowest=0.5)],
    ),
}
"""What the tests of packaging run through."""
