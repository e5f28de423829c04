"""Decisions, in pure Python: what runs next, in which blocks. No torch, no numpy, no clock of its own."""
