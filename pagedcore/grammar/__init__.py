"""Outputs that follow a grammar: compiled once, then one mask of allowed tokens a step, computed beside the device's work."""
