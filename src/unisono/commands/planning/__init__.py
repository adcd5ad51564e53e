"""The parts of the command `unisono plan`: `plan_options` are its options.

`plan_inputs` reads what they name, `layout_tables` prints layouts and Pareto fronts,
`outlook_tables` the cost, scaling and sensitivity, `planner_errors` the errors on published runs,
`own_measurements` makes a calibration.
"""
