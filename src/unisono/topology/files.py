"""Reads topologies from files or specs. In this package, only this module and discovery read
files."""

from __future__ import annotations

from pathlib import Path

from unisono.text_files import reading
from unisono.topology.graph import Topology
from unisono.topology.nccl import from_nccl_xml
from unisono.topology.spec import parse
from unisono.topology.topology_json import from_json


def load(text: str) -> Topology:
    """Reads a topology from a .json file of `to_json`, an .xml file of NCCL, or a spec.

    Raises `ValueError` for an invalid spec, and for a file that cannot be read.

    >>> load("ring:4").num_ranks
    4
    """
    path = Path(text)
    if path.suffix == ".json":
        with reading(path) as found:
            return from_json(found)
    if path.suffix == ".xml":
        with reading(path) as found:
            return from_nccl_xml(found, name=path.stem)
    return parse(text)
