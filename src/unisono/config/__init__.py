"""Settings from the environment, and the rank that a launcher assigned to this process.

Only this package reads the environment. `docs/environment.md` lists the variables. Explicit
arguments take precedence over all of them.
"""

from unisono.config.environment import (
    DEFAULT_PEER_TIMEOUT_S,
    DEFAULT_STAGING_BYTES,
    DEFAULT_TIMEOUT_S,
    MOST_RANKS,
    VARIABLES,
    FlightRecorder,
    LocalRank,
    Settings,
    TimelineSettings,
    cpu_model,
    export,
    export_threads,
    export_to_torch,
    flight_recorder,
    gloo_network,
    launched_rank,
    override,
    rank_if_launched,
    replaced_backend,
    settings,
    timeline_settings,
    tuned_path,
)
from unisono.config.jax_environment import prepare_jax
from unisono.config.launchers import DERIVED_PORTS, MPI, TCP, TORCH_STORE, LaunchedRank
from unisono.config.mlx_environment import prepare_mlx
from unisono.config.rank_environment import adopt, of_child, own_variables

__all__ = [
    "DEFAULT_PEER_TIMEOUT_S",
    "DEFAULT_STAGING_BYTES",
    "DEFAULT_TIMEOUT_S",
    "DERIVED_PORTS",
    "MOST_RANKS",
    "MPI",
    "TCP",
    "TORCH_STORE",
    "VARIABLES",
    "FlightRecorder",
    "LaunchedRank",
    "LocalRank",
    "Settings",
    "TimelineSettings",
    "adopt",
    "cpu_model",
    "export",
    "export_threads",
    "export_to_torch",
    "flight_recorder",
    "gloo_network",
    "launched_rank",
    "of_child",
    "override",
    "own_variables",
    "prepare_jax",
    "prepare_mlx",
    "rank_if_launched",
    "replaced_backend",
    "settings",
    "timeline_settings",
    "tuned_path",
]
