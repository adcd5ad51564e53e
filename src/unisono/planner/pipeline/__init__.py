"""Pipeline schedules: the bubble of each, and the order and times of its tasks."""
