"""HTTP beneath the routes: JSON text, API keys, ids and classes of requests, and streams of events that end with their client."""
