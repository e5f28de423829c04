"""Tools of a chat: what a model may call, how it writes a call, and the calls read back out of its text as it comes."""
