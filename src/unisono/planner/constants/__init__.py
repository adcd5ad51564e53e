"""The constants of the planner's formulas, as shipped or calibrated on a user's own runs."""
