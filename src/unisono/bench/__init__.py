"""The benchmark: every contestant in one run, alternating, verified on every rank.

A contestant is a world of rank processes that stay alive for the whole run and sleep in the
kernel while the others are measured (`world`, `worker`). `runner` alternates between them,
`results` holds what was measured, `report` and `plot` show it. Ranks run on this machine, or on
the hosts of a `lab` (`cluster`).
"""
