"""What one tenant may take from the others, in plain Python: rows, places in the queue, and blocks of the cache."""
