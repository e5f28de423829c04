"""HTTP beneath the routes: JSON text, ids of requests, and streams of events that end with their client."""
