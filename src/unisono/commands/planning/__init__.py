"""The implementation of the command `unisono plan`. `plan_options` has the options of the command.

`plan_inputs` reads models, clusters and layouts. `layout_tables` prints layouts and Pareto fronts,
`outlook_tables` prints cost, scaling and sensitivity, and `planner_errors` prints the errors on
published runs. `own_measurements` makes a calibration.
"""
