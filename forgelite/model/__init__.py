"""torchtitan models, by name or from a Hugging Face folder: the same code for the trainer and the reference.

Only `device`, `rows` and `hf_config` may be imported before `device.prepare_torchtitan()` has run; the other
modules import torchtitan.
"""
