from pathlib import Path

import pytest

from oriel_logic.loading.sources import HandlerFile, handler_files, installed_files, named_file, natural


def lay(root: Path, *paths: str) -> Path:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text("")
    return root


def test_files_folders_and_versions_are_found(tmp_path: Path) -> None:
    root = lay(
        tmp_path,
        "sentiment.py",
        "review.toml",
        "pyproject.toml",
        "_helper.py",
        ".hidden.py",
        "notes.md",
        "digits/handler.py",
        "digits/prep.py",
        "ranker/10/handler.py",
        "ranker/9/handler.py",
        "ranker/_old/handler.py",
        "ranker/no handler/x.py",
        "empty/x.txt",
    )
    found = handler_files([root])
    assert [(each.name, each.version, each.label, each.module) for each in found] == [
        ("digits", "1", "digits/handler.py", "oriel_services.digits"),
        ("ranker", "9", "ranker/9/handler.py", "oriel_services.ranker_v9"),
        ("ranker", "10", "ranker/10/handler.py", "oriel_services.ranker_v10"),
        ("review", "1", "review.toml", "oriel_services.review"),
        ("sentiment", "1", "sentiment.py", "oriel_services.sentiment"),
    ]
    assert found[0].folder == root / "digits" and found[-1].folder == root


def test_import_names_are_unique(tmp_path: Path) -> None:
    first, second = lay(tmp_path / "a", "a-b.py", "a_b.py"), lay(tmp_path / "b", "a_b.py")
    modules = [each.module for each in handler_files([first, second])]
    assert modules == ["oriel_services.a_b", "oriel_services.a_b@2", "oriel_services.a_b@3"]


@pytest.mark.parametrize(
    "file",
    [
        HandlerFile(module="oriel_services.x", path=Path("/s/x.py"), folder=Path("/s"), name="x", version="2"),
        HandlerFile(module="package.module", attribute="Thing.service"),
    ],
)
def test_a_record_is_the_file(file: HandlerFile) -> None:
    assert HandlerFile.from_record(file.to_record()) == file


def test_versions_are_in_the_order_people_count() -> None:
    names = ["10", "9", "1.10", "1.9", "v2", "v10", "beta", "1"]
    assert sorted(names, key=natural) == ["beta", "v2", "v10", "1", "1.9", "1.10", "9", "10"]


def test_installed_services_are_named_by_module_and_attribute() -> None:
    assert named_file("shop.ranking:Ranker") == HandlerFile(module="shop.ranking", attribute="Ranker")
    for text in ("shop.ranking", "shop/ranking:x", ":x", "x:", "a b:c"):
        with pytest.raises(ValueError, match="name it as module:attribute"):
            named_file(text)


def test_entry_points_are_services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay(tmp_path, "shop-1.dist-info/METADATA")
    (tmp_path / "shop-1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: shop\nVersion: 1\n")
    (tmp_path / "shop-1.dist-info/entry_points.txt").write_text("[oriel.services]\nranking = shop.ranking:Ranker\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert HandlerFile(module="shop.ranking", attribute="Ranker", name="ranking") in installed_files()


def test_what_is_for_tests_is_no_handler(tmp_path: Path) -> None:
    for name in ("one.py", "test_one.py", "conftest.py", "fakes.py", "contest.py", "pyproject.toml", "chain.toml"):
        (tmp_path / name).touch()
    assert [file.name for file in handler_files([tmp_path])] == ["chain", "contest", "one"]
