"""Host memory for KV blocks: pinning it, copying to it and back, and what that costs beside computing."""
