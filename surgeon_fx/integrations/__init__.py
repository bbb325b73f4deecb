"""surgeon_fx inside trainers: `surgeon_fx.integrations.hf` and `surgeon_fx.integrations.lightning`.

Each imports its trainer, which is not a dependency of the package: `pip install surgeon-fx[hf]` or `[lightning]`.
"""
