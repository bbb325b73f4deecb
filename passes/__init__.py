"""FX passes: capture a model and rewrite what it saves for backward."""
