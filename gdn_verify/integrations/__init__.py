"""The operator inside other projects: `transformers` (models) and `vllm` (a plugin).

Neither project is needed to import this package; each module says so where its own is missing.
"""
