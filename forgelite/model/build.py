"""A model in one process, with its starting weights."""

from __future__ import annotations

import torch
from torchtitan.models.common.decoder import Decoder

from forgelite.model.hf import export_hf, load_hf, read_hf
from forgelite.model.spec import ModelDefinition


def build_model(definition: ModelDefinition, seed: int, device: torch.device) -> Decoder:
    """The whole model on one device, with the weights of `starting_weights`; it gives hidden states."""
    model = _build_random(definition, seed)
    if definition.folder is not None:
        load_hf(model, definition.spec, read_hf(definition.folder))
    model._skip_lm_head = True  # the head is applied where tokens are scored, at the trained positions only
    return model.to(device)


def starting_weights(definition: ModelDefinition, seed: int) -> dict[str, torch.Tensor]:
    """The weights a run starts from, by Hugging Face name: those in the folder, or random ones from the seed.

    The random ones do not depend on how many processes there are.
    """
    if definition.folder is not None:
        return read_hf(definition.folder)
    return dict(export_hf(_build_random(definition, seed), definition.spec))


def _build_random(definition: ModelDefinition, seed: int) -> Decoder:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = definition.spec.model.build()
        model.init_states()
    return model
