"""What the documents repeat from the source is up to date."""

from __future__ import annotations

import re
import runpy
from dataclasses import fields
from pathlib import Path

import pytest

from loramux import config

CHECKOUT = Path(__file__).parents[2]
DOCUMENTS = [*CHECKOUT.glob("*.md"), *(CHECKOUT / "docs").glob("*.md")]


def test_configuration_page_is_up_to_date() -> None:
    generated = runpy.run_path(str(CHECKOUT / "docs" / "generate.py"))["render"]()
    page = (CHECKOUT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == generated, "run scripts/docs"


def test_configuration_page_has_every_option() -> None:
    page = (CHECKOUT / "docs" / "configuration.md").read_text(encoding="utf-8")
    engine = (field.default_factory for field in fields(config.EngineOptions))
    for option in (f for group in (*engine, config.ServerOptions) for f in fields(group)):
        assert f"| `{option.name}` |" in page


def test_readme_shows_the_example_file() -> None:
    readme = (CHECKOUT / "README.md").read_text(encoding="utf-8")
    example = (CHECKOUT / "examples" / "quickstart.py").read_text(encoding="utf-8")
    assert f"```python\n{example}```\n" in readme


def test_readme_fits_one_screen() -> None:
    assert len((CHECKOUT / "README.md").read_text(encoding="utf-8").splitlines()) <= 40


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_to_files_lead_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8"))
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (document.parent / target).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_commands_and_source_files_exist(document: Path) -> None:
    words = re.findall(
        r"`((?:scripts|src|examples)/[\w/.-]+)", document.read_text(encoding="utf-8")
    )
    assert [word for word in words if not (CHECKOUT / word).exists()] == []


def test_options_named_to_those_who_come_from_elsewhere_exist() -> None:
    lines = (CHECKOUT / "docs" / "migrating.md").read_text(encoding="utf-8").splitlines()
    here = " ".join(line.split("|")[2] for line in lines if line.startswith("| "))
    named = set(re.findall(r"`(--[a-z-]+)", here))
    engine = (field.default_factory for field in fields(config.EngineOptions))
    groups = (*engine, config.ServerOptions)
    known = [f for group in groups for f in fields(group)]
    options = {"--" + f.name.replace("_", "-") for f in known}
    options |= {"--no-" + f.name.replace("_", "-") for f in known if isinstance(f.default, bool)}
    assert len(named) > 8
    assert named - options == {"--adapter"}
