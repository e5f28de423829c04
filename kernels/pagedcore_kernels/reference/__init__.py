"""Plain torch ops, one file each: the meaning that every fast op of the same name must match, on any device."""
