"""Build what a release uploads, check it, and use it as a user would. Run by ``make release``.

    commit ─copy─> sdist ─build─> wheel ─install─> empty environment ─> export ─> optimize ─> serve ─> classify

The steps, cheapest first:

1. `steps`: the version in gmmvit_deploy/__init__.py and the topmost heading of CHANGELOG.md agree, and nothing is
   uncommitted.
2. `archives`: build the sdist from the tracked files alone, and from the sdist a pure wheel, and one for each
   platform with the compiled CPU kernels (`compiled_kernels`).
3. `archives`: ``twine check --strict`` passes, and each archive holds exactly the tracked files that belong in it.
4. `wheel_in_use`: for each supported Python on this machine, install the wheel for this platform with its extras
   ``cpu`` and ``serve`` into an empty environment, export a checkpoint there, optimize and serve it, and compare the
   server's answers with those of the bundle.

The extra ``dev`` has the tools: build, hatchling and twine.
"""
