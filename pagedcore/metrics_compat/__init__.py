"""The same numbers under the names of another engine, for dashboards, autoscalers and gateways that were made for it."""
