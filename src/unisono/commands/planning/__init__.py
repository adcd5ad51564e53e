"""The implementation of the command `unisono plan`. `plan_options` has the options of the command.

`plan_inputs` reads models, clusters and layouts. `layout_tables` prints layouts and Pareto fronts,
`like_tables` another framework's job, `scaling_cost_tables` cost, scaling and sensitivity.
`own_measurements` makes a calibration.
"""
