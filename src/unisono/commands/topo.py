"""The command `unisono topo`. This module is fast to import."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unisono.commands.outputs import JsonOption, print_written, result_console, writable, write_json

if TYPE_CHECKING:
    from unisono.topology import Topology


NetworkArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[SPEC|FILE]",
        help="Such as torus:4x4; a .json file, or NCCL's .xml; by default this machine.",
    ),
]
SvgOption = Annotated[
    Path | None, typer.Option("--svg", callback=writable, metavar="FILE", help="Write a picture.")
]
HtmlOption = Annotated[
    Path | None,
    typer.Option("--html", callback=writable, metavar="FILE", help=("Write an interactive page.")),
]
SaveOption = Annotated[
    Path | None,
    typer.Option(
        "--save",
        callback=writable,
        metavar="FILE",
        help="Write the network: .json, or NCCL's .xml.",
    ),
]


def topo(
    *,
    what: NetworkArgument = None,
    svg_path: SvgOption = None,
    html_path: HtmlOption = None,
    save_path: SaveOption = None,
    json_path: JsonOption = None,
) -> None:
    """Print a network: ranks, links, distances, bisection; draw it; write it to a file.

    Specs: ring:8, line:8, mesh:8, star:8, torus:4x4x4, grid:4x4, hypercube:4, fat_tree:k=4,
    leaf_spine:leaves=4,spines=2,hosts=4, rail_optimised:hosts=4,gpus=8, dragonfly:a=4,p=2,h=2,
    dragonfly_plus:k=4, nvswitch:8, pcie_server, dgx:8, and a server at each endpoint of a network:
    dgx:8/fat_tree:k=8. Options of links: bandwidth=400Gbit, latency=500ns, kind=ethernet.
    """
    from unisono.show import network_table
    from unisono.topology import discover, load

    wanted = ((svg_path, (".svg",)), (html_path, (".html",)), (save_path, (".json", ".xml")))
    try:
        topology = discover() if what is None else load(what)
        files = [
            (path, _text(topology, path, suffixes)) for path, suffixes in wanted if path is not None
        ]
        for path, text in files:
            path.write_text(text, encoding="utf-8")
        document = _document(topology)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    console = result_console(json_path)
    console.print(network_table(topology))
    if topology.nodes.names and len(topology.nodes) <= 64:
        console.print("nodes: " + ", ".join(topology.nodes.names), highlight=False)
    print_written(console, [path for path, _ in files])
    write_json(document, json_path)


def _text(topology: Topology, path: Path, suffixes: tuple[str, ...]) -> str:
    from unisono.show import network_html, network_svg
    from unisono.topology import to_json, to_nccl_xml

    writers = {".svg": network_svg, ".html": network_html, ".json": to_json, ".xml": to_nccl_xml}
    if path.suffix not in suffixes:
        raise ValueError(f"{path}: the file name must end in {' or '.join(suffixes)}")
    return writers[path.suffix](topology)


def _document(topology: Topology) -> dict[str, Any]:
    return {
        "name": topology.name,
        "num_ranks": topology.num_ranks,
        "num_nodes": topology.num_nodes,
        "num_links": topology.num_links,
        "num_directed_links": len(topology.links),
        "diameter": topology.diameter(),
        "mean_distance": topology.mean_distance(),
        "bisection_Bps": topology.bisection_Bps(),
        "names": list(topology.nodes.names),
    }
