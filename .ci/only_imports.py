"""A contract of import-linter: a package imports itself, the standard library and what is listed, and nothing else."""

from __future__ import annotations

import sys

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output

__all__ = ["OnlyImports"]


class OnlyImports(Contract):
    package = fields.StringField()
    listed = fields.SetField(subfield=fields.StringField())

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        allowed = {*self.listed, *sys.stdlib_module_names}
        others = sorted(
            (module, imported)
            for module in (self.package, *graph.find_descendants(self.package))
            for imported in graph.find_modules_directly_imported_by(module)
            if not f"{imported}.".startswith(f"{self.package}.") and imported.split(".")[0] not in allowed
        )
        return ContractCheck(kept=not others, metadata={"others": others})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for module, imported in check.metadata["others"]:
            output.print_error(f"{module} imports {imported}")
