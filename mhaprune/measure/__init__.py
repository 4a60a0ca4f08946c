"""What ablating heads does to the loss: units of work, engines, baselines, the store."""
