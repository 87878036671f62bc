"""A contract of import-linter: a module ``_name`` is imported only within its package.

The other modules of a package are its face, which the docstring of the package lists.
"""

from __future__ import annotations

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, output

__all__ = ["PrivateModules"]


class PrivateModules(Contract):
    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        reached = sorted(
            (importer, module)
            for module in graph.modules
            if (package := _package_of_private(module)) is not None
            for importer in graph.find_modules_that_directly_import(module)
            if not f"{importer}.".startswith(f"{package}.")
        )
        return ContractCheck(kept=not reached, metadata={"reached": reached})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for importer, module in check.metadata["reached"]:
            output.print_error(f"{importer} imports {module}, which is private to {_package_of_private(module)}")


def _package_of_private(module: str) -> str | None:
    """Return the package that a private module of this project belongs to, or None."""
    parts = module.split(".")
    private = next((index for index, part in enumerate(parts) if index and part.startswith("_")), None)
    return None if private is None else ".".join(parts[:private])
