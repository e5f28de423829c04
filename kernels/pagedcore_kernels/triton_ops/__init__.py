"""Triton ops, one file each: what the plain torch op of the same name means, at the speed of the card."""
