"""The README and the documentation: every block runs, and names agree with the program in both directions.

GMMVIT_WRITE_DOCS=1 makes the test of a page write the output of its commands into the page.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from typer.main import get_command

from docs import lists
from docs.gmmvit_docs import command_reference
from docs.pictures import PICTURES, draw
from gmmvit_cli.main import app
from gmmvit_deploy.demo.models import OwnModel, save_checkpoint, train
from gmmvit_deploy.demo.run import save_images
from gmmvit_deploy.images.data.files import KINDS
from gmmvit_deploy.images.data.formats import digits
from gmmvit_deploy.images.datasets import DATASETS
from gmmvit_deploy.inference.precision import PRECISIONS
from gmmvit_deploy.inference.runner_name import RunnerName
from gmmvit_deploy.models.families import FAMILIES
from gmmvit_deploy.models.folding.fold import folding_passes
from gmmvit_deploy.models.sources.hints import SETTINGS
from gmmvit_deploy.parity import check as parity_check
from gmmvit_deploy.runtimes.engines.flavors import FLAVORS
from gmmvit_deploy.runtimes.engines.releases import RELEASES
from gmmvit_deploy.runtimes.kernels.libraries import openvino_library
from gmmvit_deploy.runtimes.runners.names import RUNNERS
from gmmvit_deploy.serving.front.process import _EXIT_BEHIND_GATEWAY_S
from gmmvit_deploy.serving.gateway.gateway import _STOP_S
from gmmvit_deploy.serving.gateway.haproxy import _END_S
from gmmvit_deploy.serving.names import Backend
from gmmvit_deploy.serving.server import _EXIT_S, ServerOptions
from tests.conftest import GOLDEN
from tests.documented import (
    NAVIGATION,
    PAGES,
    README,
    ROOT,
    Block,
    Shell,
    blocks,
    commands,
    first_column,
    mismatch,
    table,
    texts,
    with_output,
)
from tests.models.families.custom.own_files import ARGUMENTS, NETWORK, documented_code, save_weights
from tests.models.families.small_specs import SMALL

TEXTS = texts()
BLOCKS: dict[Path, list[Block]] = {page: list(blocks(page, text)) for page, text in TEXTS.items()}
GROUP: Any = get_command(app)
CLI: dict[str, Any] = {name: GROUP.get_command(None, name) for name in GROUP.list_commands(None)}
RUN = ("console", "python")
OTHERS = ("go", "java", "javascript", "yaml")
"""Languages of blocks that have a test of their own."""
WITH_BLOCKS = [
    page for page, page_blocks in BLOCKS.items() if any(b.language in RUN and b.runs_here for b in page_blocks)
]
WRITE = "GMMVIT_WRITE_DOCS"
MAX_NOT_RUN = 0.1
MAX_README_BYTES = 6144


@pytest.mark.parametrize("page", ["commands.md", "python_api.md"])
def test_the_list_of_commands_or_functions_is_that_of_the_program(page: str) -> None:
    current = lists.written(page)
    assert current.count("\n- `") > 15
    assert (PAGES / page).read_text(encoding="utf-8") == current, "type python docs/lists.py --write"


# Blocks


def test_blocks_name_their_language_and_hide_no_command() -> None:
    for block in (block for page_blocks in BLOCKS.values() for block in page_blocks):
        assert block.language in (*RUN, *OTHERS, "text", "json"), f"{block.where}: language {block.language!r}"
        if block.test or block.language in OTHERS:
            assert (ROOT / block.test).is_file(), f"{block.where}: the test {block.test!r} that runs the block"
        if block.language not in RUN:
            assert not re.search(r"^\s*(\$|>>>|gmmvit|make|pip|python|pytest) ", block.text, re.MULTILINE), block.where
        if block.language == "json":
            json.loads(block.text)


def test_at_most_one_block_in_ten_is_not_run() -> None:
    to_run = [block for page_blocks in BLOCKS.values() for block in page_blocks if block.language in RUN]
    not_run = [block.where for block in to_run if block.reason]
    assert len(to_run) > 20
    assert len(not_run) <= MAX_NOT_RUN * len(to_run), not_run


def test_every_page_is_in_the_navigation() -> None:
    assert {str(path.relative_to(PAGES)) for path in PAGES.rglob("*.md")} == set(NAVIGATION)


TIMM_FILES = (
    "timm_vit.pth.tar",
    "timm_vit_registers",
    "timm_vit_qk_norm.pth",
    "torchvision_vit_conv_stem.pth",
    "dino_teacher.pth",
    "dino_linear.pth",
)


@pytest.fixture
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a reader before the first command.

    Digits, a ViT of unknown heads, a ViT with an average, and two classes of the reader's own.
    """
    folder = tmp_path_factory.mktemp("documentation")
    own = OwnModel()
    # Written output comes from a trained model; a test run does without.
    model = train(own, digits("train"), epochs=own.epochs if os.environ.get(WRITE) else 1)
    save_checkpoint(model, folder / "checkpoint.pth", epoch=own.epochs)
    save_images(folder / "images", digits("test"), own.png)
    weights = torch.load(GOLDEN / "vit_gmm.pth", weights_only=True)["model_state_dict"]
    torch.save({"state_dict": weights, "state_dict_ema": weights}, folder / "last.pth.tar")
    (folder / "plain.pth").symlink_to(GOLDEN / "vit_plain.pth")
    for name in TIMM_FILES:
        (folder / name).symlink_to(GOLDEN / "timm" / name)
    (folder / "rmt.pth").symlink_to(GOLDEN / "rmt" / "rmt_tiny_like.pth")
    (folder / "mnist.pt").symlink_to(GOLDEN / "naive_vit" / "mnist_vit.pt")
    (folder / "deepvit.pt").symlink_to(GOLDEN / "vit_pytorch" / "vp_deepvit.pt")
    (folder / "my_vit.py").write_text(NETWORK, encoding="utf-8")
    save_weights(folder / "my_vit.py", folder / "my_vit.pth", **ARGUMENTS)
    (folder / "external.py").write_text(documented_code(), encoding="utf-8")
    save_weights(folder / "external.py", folder / "external.pth", cls="Classifier")
    (folder / "vit_of_32_pixels.pth.tar").symlink_to(GOLDEN / "timm" / "timm_vit.pth.tar")
    return folder


@pytest.fixture
def shell(scratch: Path, gmmvit: Callable[..., subprocess.CompletedProcess[str]]) -> Iterator[Shell]:
    shell = Shell(scratch, gmmvit)
    yield shell
    shell.close()


@pytest.mark.integration
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "pages",
    [
        pytest.param([page for page in WITH_BLOCKS if page.name == "index.md"][:1], id="quickstart"),
        pytest.param(WITH_BLOCKS, id="all pages", marks=pytest.mark.nightly),
    ],
)
def test_every_block_runs(
    pages: list[Path], shell: Shell, scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of the navigation: a page may use what an earlier page wrote, so the pages are one test.

    Pictures are drawn from what the commands of all pages wrote.
    """
    monkeypatch.chdir(scratch)
    monkeypatch.syspath_prepend(scratch)  # as for a reader who starts Python in this folder
    for page in pages:
        names: dict[str, object] = {}
        for block in (block for block in BLOCKS[page] if block.runs_here):
            if block.language == "python":
                exec(compile(block.text, block.where, "exec"), names)  # noqa: S102 - our own documentation
            elif block.language == "console":
                _run_console(block, shell)
    if pages == WITH_BLOCKS:
        draw(scratch, tmp_path)
        drawn = {path.name for path in tmp_path.iterdir()}
        assert drawn == {path.name for path in PICTURES.iterdir()}
        text = "".join(TEXTS.values())
        assert all(f"pictures/{name})" in text for name in drawn)


def _run_console(block: Block, shell: Shell) -> None:
    outputs = {}
    for command in commands(block):
        answer = shell.run(command.text)
        assert answer.returncode == block.status, f"{block.where}: {command.text}\n{answer.stdout}\n{answer.stderr}"
        outputs[command.text] = answer.stdout or answer.stderr
        if not os.environ.get(WRITE):
            missing = mismatch(command.output, outputs[command.text], ignored=_not_here)
            assert not missing, f"{block.where}: {command.text}\nno line {missing!r} in\n{outputs[command.text]}"
    if os.environ.get(WRITE):
        block.page.write_text(with_output(block.page.read_text(encoding="utf-8"), block, outputs), encoding="utf-8")


def _not_here(line: str) -> bool:
    """Lines about our CPU kernels are not compared where they are not available."""
    return "+kernels" in line and openvino_library()[0] is None


# Names of the program stand in the documentation, and the other way round


def _code_spans() -> Iterator[tuple[str, str]]:
    """(place, code) of every span in backticks and every command of a console block."""
    for page, text in TEXTS.items():
        prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        for span in re.findall(r"`([^`\n]+)`", prose):
            yield str(page.relative_to(ROOT)), span
        for block in BLOCKS[page]:
            if block.language == "console":
                yield from ((block.where, command.text) for command in commands(block))


def _options(command: str) -> set[str]:
    names = {name for parameter in CLI[command].params for name in (*parameter.opts, *parameter.secondary_opts)}
    return {name for name in names if name.startswith("-")}


def test_commands_of_the_documentation_are_those_of_the_program() -> None:
    named = {
        (match[1], where)
        for where, code in _code_spans()
        if (match := re.match(r"gmmvit ([a-z]\S*)", code)) is not None
    }
    assert {name for name, where in named} == set(CLI), sorted(named)
    in_readme = {name for name, where in named if where.startswith("README.md")}
    assert in_readme == set(CLI)


def test_options_of_the_documentation_are_those_of_the_program() -> None:
    every = {option for name in CLI for option in _options(name)} | {"--help", "--version"}
    # benchmarks/tables.py, curl, torchrun, docker, kubectl
    of_others = {"--write", "--data-binary", "--cacert", "--standalone", "--nproc-per-node", "--cpuset-cpus", "--cpus"}
    of_others |= {"--model-ema", "--from-file", "--from-literal", "--cert", "--key", "--connect-to", "--no-deps"}
    of_others |= {"--shm-size", "--local-dir"}
    for where, code in _code_spans():
        command = re.match(r"gmmvit ([a-z]+)", code)
        known = _options(command[1]) | {"--help"} if command else every | of_others
        for option in re.findall(r"(?<![\w-])(--?[a-zA-Z][\w-]*)", code):
            if command or option.startswith("--"):
                assert option in known, f"{where}: {code}: {option}"
        for name in re.findall(r"--set (\w+)", code):
            assert name in {*SETTINGS, "NAME", "help"}, f"{where}: {code}: --set {name}"


CHECKS = re.findall(r"^    ([a-z][a-z ]*?)  +\S", parity_check.__doc__ or "", re.MULTILINE)
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
PASSES = [run.__name__ for family in FAMILIES for run in folding_passes(SMALL[family.name])]


@pytest.mark.parametrize(
    ("page", "heading", "names"),
    [
        ("jobs/parity.md", "runner", RUNNERS),
        ("jobs/parity.md", "check", CHECKS),
        ("precisions.md", "precision", PRECISIONS),
        ("masks.md", "pass", PASSES),
        ("jobs/serve.md", "`--backend`", get_args(Backend)),
        ("jobs/build.md", "`--flavor`", {*FLAVORS, "auto"}),
        ("install.md", "extra", EXTRAS),
    ],
)
def test_a_table_lists_the_names_of_the_program(page: str, heading: str, names: Iterable[str]) -> None:
    listed = first_column(page, heading) or [row[0] for row in table(page, heading)]
    assert sorted(listed) == sorted(set(names))


def test_runners_of_commands_are_those_of_the_program() -> None:
    for where, code in _code_spans():
        for value in re.findall(r"--(?:runner|runtime) (\S+)", code):
            for part in value.split(","):
                assert RunnerName.parse(part).name in RUNNERS, where


def test_families_masks_and_presets_are_those_of_the_program() -> None:
    rows = {re.findall(r"`(\w+)`", row[0])[0]: row for row in table("models/index.md", "family")}
    assert list(rows) == [family.name for family in FAMILIES]
    pages = {name.removeprefix("models/").removesuffix(".md") for name in NAVIGATION if name.startswith("models/")}
    assert pages == {family.name for family in FAMILIES} | {
        "index",
        "own_class",
        "spt_lsa",
        "timm_masks",
        "timm_resize",
    }
    for family in FAMILIES:
        assert tuple(rows[family.name][2].lower().split(", ")) == family.mask_kinds
        text = (PAGES / "models" / f"{family.name}.md").read_text(encoding="utf-8")
        presets = first_column(f"models/{family.name}.md", "preset") if "| preset |" in text else []
        assert presets == list(family.presets)


def test_data_is_that_of_the_program() -> None:
    rows = table("jobs/export.md", "`--dataset`")
    assert {row[0].strip("`"): int(row[1].partition(",")[0]) for row in rows} == {
        name: len(data.labels) for name, data in DATASETS.items()
    }
    assert {name.partition(":")[0] for name in first_column("jobs/convert.md", "data")} == set(KINDS)


def test_releases_of_triton_are_those_of_the_program() -> None:
    rows = {release: tuple(versions) for release, *versions in table("triton_gpu.md", "Triton container")}
    assert rows == RELEASES


def test_make_targets_are_those_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[1].split())  # type: ignore[index]
    assert {name.removeprefix("make ") for name in first_column("developing.md", "target")} == targets
    assert {target for _, code in _code_spans() for target in re.findall(r"^make ([a-z-]+)", code)} <= targets
    assert {*re.findall(r"(?:^|`)make ([a-z-]+)", CONTRIBUTING, re.MULTILINE)} <= targets


# The README, tables, links


def test_the_readme_is_short() -> None:
    assert len(README.read_bytes()) <= MAX_README_BYTES


def test_links_lead_to_files_and_headings_that_exist() -> None:
    for page, text in TEXTS.items():
        prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        for link in re.findall(r"\]\(([^)\s]+)\)", prose):
            if "://" in link:
                continue
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            assert target.exists(), f"{page.relative_to(ROOT)}: {link}"
            if anchor:
                headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
                slugs = {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading.lower())) for heading in headings}
                assert anchor in slugs, f"{page.relative_to(ROOT)}: {link}"


# CONTRIBUTING.md and docs/pages/rollouts.md

CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()


def test_folders_and_files_of_contributing_exist() -> None:
    rows = re.findall(r"^\| (`.*?) \|", CONTRIBUTING, re.MULTILINE)
    assert len(rows) > 10
    for row in rows:
        first, *others = re.findall(r"`([^`]+)`", row)
        parent = (ROOT / first).parent  # `gmmvit_deploy/parity/`, `bench/`: the second is beside the first
        for path in (ROOT / first, *(parent / name for name in others)):
            assert path.is_dir(), f"{path} in the row {row!r}"
    for link in re.findall(r"\]\(([^)]+)\)", CONTRIBUTING):
        assert (ROOT / link).is_file(), link


def test_systemd_waits_longer_than_the_service_needs_to_end() -> None:
    """Rollout, gateway, two fronts and two servers end one after the other."""
    text = (ROOT / "docs/pages" / "rollouts.md").read_text(encoding="utf-8")
    longest = 30 + (_STOP_S + 3 * _END_S) + 2 * (_EXIT_BEHIND_GATEWAY_S + ServerOptions().exit_timeout_s + _EXIT_S)
    assert int(re.findall(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)[0]) > longest


def test_the_command_reference_has_every_command_and_option() -> None:
    sections = dict(re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", command_reference(), re.MULTILINE | re.DOTALL))
    assert set(sections) == set(CLI)
    for name, section in sections.items():
        for option in _options(name):
            assert option in section, f"{name} {option}"
        for parameter in CLI[name].params:
            if parameter.param_type_name == "argument":
                assert (parameter.help or "") in section, f"{name} {parameter.name}"
