"""Tests of the source distribution and the wheel, outside of the source tree."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import celery_idempotent

ROOT = Path(__file__).parents[2]
SCRIPTS = {path.name for path in (ROOT / "lua").glob("*.lua")}

pytestmark = [pytest.mark.exhaustive, pytest.mark.slow]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel that was built from it."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT]
    subprocess.run(command, check=True, capture_output=True)
    return out


def test_the_wheel_contains_the_package_its_scripts_and_its_types(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())

    assert {f"celery_idempotent/lua/{script}" for script in SCRIPTS} <= names
    assert "celery_idempotent/py.typed" in names
    dashboard = ROOT / "celery_idempotent" / "dashboard"
    for file in (*dashboard.glob("templates/*"), *dashboard.glob("static/*")):
        assert str(file.relative_to(ROOT)) in names
    assert not [name for name in names if name.startswith(("tests", "examples", "lua"))]


def test_the_metadata_is_valid_and_the_description_renders(built: Path) -> None:
    check = [sys.executable, "-m", "twine", "check", "--strict", *built.iterdir()]
    result = subprocess.run(check, capture_output=True, text=True)

    assert result.returncode == 0, result.stdout + result.stderr


def test_links_of_the_description_lead_to_the_release(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    archive = zipfile.ZipFile(wheel)
    (metadata,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
    text = archive.read(metadata).decode()
    tag = f"v{celery_idempotent.__version__}"

    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    paths = [link.partition(f"/{tag}/")[2].partition("#")[0] for link in links]
    assert len([path for path in paths if path]) > 20
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_sdist_installs_what_the_wheel_has(built: Path, tmp_path: Path) -> None:
    (sdist,), (wheel,) = built.glob("*.tar.gz"), built.glob("*.whl")
    how = ["--quiet", "--no-deps", "--no-build-isolation", "--no-compile", "--target", tmp_path]
    subprocess.run([sys.executable, "-m", "pip", "install", *how, sdist], check=True)

    installed = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    names = {name for name in zipfile.ZipFile(wheel).namelist() if "dist-info" not in name}
    assert {name for name in installed if "dist-info" not in name} == names


def test_the_demo_runs_with_the_wheel_only(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COV"))
    }
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", f"{wheel}[demo]"]
    subprocess.run(install, check=True, env=environment)

    command = [python, "-m", "celery_idempotent.demo", "--json"]
    demo = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    assert demo.returncode == 0, demo.stderr
    assert json.loads(demo.stdout)
