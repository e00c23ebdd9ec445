"""A model by its name, or by its dimensions, as a profile. No torch."""

from __future__ import annotations

from meshwright.core.profile import Profile
from meshwright.models.config import DecoderConfig, preset
from meshwright.models.cost import decoder_profile


def profile(model: str | DecoderConfig) -> Profile:
    """`profile("llama3-8b")`, or the profile of any DecoderConfig."""
    if isinstance(model, str):
        return decoder_profile(preset(model), model)
    return decoder_profile(model, "decoder")
