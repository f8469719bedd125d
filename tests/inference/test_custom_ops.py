"""Libraries of custom operators come from one folder, and the process that checks the model tries them first.

No library with operators is built here: ONNX Runtime's own error shows that it was asked to load the right file.
"""

from pathlib import Path

import pytest

from oriel_inference.backends import find_backend
from oriel_inference.errors import LoadFailed
from oriel_inference.model import EngineOptions
from oriel_inference.repository.defaults import LoadDefaults

from . import models
from .hostile_models import refusal


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a library that is none, beside one that lies outside."""
    (tmp_path / "ops").mkdir()
    (tmp_path / "ops/broken.so").write_text("no library")
    (tmp_path / "outside.so").write_text("no library")
    (tmp_path / "ops/link.so").symlink_to(tmp_path / "outside.so")
    return tmp_path / "ops"


@pytest.mark.parametrize("name", ["../outside.so", "link.so", "missing.so", "", "a\\000b", "/outside.so", "."])
def test_a_library_outside_of_the_folder_is_refused(tmp_path: Path, folder: Path, name: str) -> None:
    text = models.DOUBLE + f'model_operations {{ op_library_filename: "{name}" }}'
    models.put(tmp_path / "root", "double", models.double(), text)
    assert "op_library_filename[0]" in refusal(tmp_path / "root", defaults=LoadDefaults(custom_ops=folder))


@pytest.mark.parametrize("form", ["broken.so", "{folder}/broken.so"])
def test_a_library_of_the_folder_is_loaded_in_the_check_first(tmp_path: Path, folder: Path, form: str) -> None:
    text = models.DOUBLE + f'model_operations {{ op_library_filename: "{form.format(folder=folder)}" }}'
    models.put(tmp_path / "root", "double", models.double(), text)

    class Check:
        def check(self, path: Path, shown: str, backend: str, options: EngineOptions, *_: object) -> bool:
            assert list(options.operators) == [str(folder / "broken.so")]
            with pytest.raises(LoadFailed, match="cannot use the operators of broken.so"):
                find_backend(backend).open(path, options)
            raise LoadFailed("tried")

    assert refusal(tmp_path / "root", defaults=LoadDefaults(custom_ops=folder), check=Check()) == "tried"
    found = refusal(tmp_path / "root", defaults=LoadDefaults(custom_ops=folder))
    assert "ONNX Runtime cannot use the operators of broken.so: Failed to load library" in found
