"""Device work: everything below a `StepPlan`. Torch starts here."""
