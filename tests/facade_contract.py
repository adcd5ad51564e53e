"""A contract for import-linter: only files of the same folder may import a folder's files."""

from __future__ import annotations

import importlib

from grimp import DetailedImport, ImportGraph
from importlinter import Contract, ContractCheck, output


class FacadeContract(Contract):
    """A rule that other folders import only from a folder's `__init__.py`, whose `__all__` lists
    the public names, among them those of subfolders with a public `__init__.py`.
    """

    type_name = "facades"

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """Finds imports of another folder's files that bypass its `__init__.py`."""
        inside = sorted(
            f"{found['importer']}, line {found['line_number']}: {found['line_contents']}"
            for module in graph.modules
            for imported in graph.find_modules_directly_imported_by(module)
            for found in graph.get_import_details(importer=module, imported=imported)
            if _reaches_inside(found)
        )
        return ContractCheck(kept=not inside, metadata={"inside": inside})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Prints the imports that break the contract."""
        for line in check.metadata["inside"]:
            output.print_error(line)


def _reaches_inside(found: DetailedImport) -> bool:
    importer, imported = found["importer"].split("."), found["imported"].split(".")
    if imported[0] != "unisono" or len(imported) < 3 or importer[:2] == imported[:2]:
        return False
    folder = ".".join(imported[:2])
    if imported[2] not in importlib.import_module(folder).__all__:
        return True
    # A public name of a folder may equal the name of one of its files. `from FOLDER import NAME`
    # then imports the public name, which is permitted.
    public = importlib.import_module(".".join(imported[:3]))
    is_folder = hasattr(public, "__path__") and len(imported) == 3
    return not is_folder and not found["line_contents"].startswith(f"from {folder} import")
