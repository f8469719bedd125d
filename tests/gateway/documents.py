"""Policy documents on disk that a test changes."""


def written(files: dict[str, bytes], before: str, after: str) -> dict[str, bytes]:
    text = files["all.toml"].decode()
    assert before in text
    return {"all.toml": text.replace(before, after).encode()}


TIER = "band = 0\ntarget_ms = 2000"


def changed(files: dict[str, bytes], old: str, new: str) -> dict[str, bytes]:
    text = files["all.toml"].decode()
    assert old in text
    return {"all.toml": text.replace(old, new).encode()}
