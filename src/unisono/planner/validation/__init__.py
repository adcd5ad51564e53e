"""The planner's errors on published training runs (`data/training_runs.csv`)."""
