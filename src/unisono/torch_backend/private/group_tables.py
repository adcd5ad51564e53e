"""Torch's tables of the process groups of a process."""

from __future__ import annotations

from typing import Any

from torch import distributed as dist

_torch_groups: Any = dist.distributed_c10d


def register_group(group: Any, backend: str, config: str, global_ranks: list[int]) -> None:
    """Registers a group that torch did not make.

    `backend` is the name that the program asked for. `config` names a backend for each device.
    """
    ranks = {global_rank: rank for rank, global_rank in enumerate(global_ranks)}
    store, name = group.get_group_store(), group.group_name
    if hasattr(_torch_groups, "_register_pg_in_world"):
        _torch_groups._register_pg_in_world(
            group,
            backend_name=backend,
            store=store,
            group_name=name,
            backend_config=config,
            rank_mapping=ranks,
        )
        return
    world, tag = _torch_groups._world, f"ptd:{name}"
    world.pg_map[group] = (backend, store)
    world.pg_names[group] = name
    world.pg_backend_config[group] = config
    world.pg_group_ranks[group] = ranks
    world.tags_to_pg.setdefault(tag, []).append(group)
    world.pg_to_tag[group] = tag
    _torch_groups._register_process_group(name, group)


def forget_group(group: Any) -> None:
    """Undoes torch's registration of a group that it has just made."""
    world = _torch_groups._world
    world.tags_to_pg[""].remove(group)  # torch's function leaves it there
    if hasattr(_torch_groups, "_cleanup_process_group_global_state"):
        _torch_groups._cleanup_process_group_global_state(group)
        return
    for table in (world.pg_map, world.pg_backend_config, world.pg_group_ranks):
        table.pop(group, None)
    del world.tags_to_pg[world.pg_to_tag.pop(group)]
    _torch_groups._unregister_process_group(world.pg_names.pop(group))


def make_default(group: Any) -> None:
    """Makes a registered group the default group, if none exists."""
    _torch_groups._update_default_pg(group)


def groups_of_torch() -> list[Any]:
    """Returns all process groups of this process that are not destroyed."""
    return list(_torch_groups._world.pg_map)


def backends_by_device(backend: str) -> dict[str, str]:
    """Returns torch's choice of a backend for each device, from the backend that a program names.
    Raises torch's `ValueError` for a list of backends that torch cannot parse.
    """
    return dict(_torch_groups.BackendConfig(dist.Backend(backend)).get_device_backend_map())


def rename_backend(group: Any, backend: str) -> None:
    """Makes torch report `backend` as the name that the program asked for."""
    world: Any = _torch_groups._world
    _, store = world.pg_map[group]
    world.pg_map[group] = (backend, store)
    config = _torch_groups.BackendConfig(dist.Backend(backend))
    world.pg_backend_config[group] = str(config)
