"""What the engine measures: cache levels, miss reasons, latencies; the same numbers whichever door a request came through.

prometheus_client is imported when the first `Recorder` is made, or at the first scrape, never before.
"""
