"""HTTP beneath the routes: bodies, JSON text, API keys, origins, ids and classes of requests, and streams that end with their client."""
