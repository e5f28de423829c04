"""Decoder models: what config.json says, where the files are, and the arithmetic.

Import from the modules: most need torch, some must not.
"""
