"""Files in the forms that PyTorch writes, made without PyTorch: their directory of contents is right, their code is not
there.
"""

import zipfile
from collections.abc import Sequence
from pathlib import Path

SCRIPT = ("m/data.pkl", "m/code/__torch__.py", "m/constants.pkl", "m/version")
STATE_DICT = ("m/data.pkl", "m/data/0", "m/version")
EXPORTED = ("m/models/model.json", "m/data/weights/weight_0", "m/archive_format", "m/data/sample_inputs/model.pt")
COMPILED = ("m/data/aotinductor/model/code.so", "m/archive_format")
OLD_EXPORT = ("serialized_exported_program.json", "serialized_state_dict.pt", "version")
OLD_PICKLE = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
TENSORS = """
input [ { name: "INPUT__0" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ 2 ] } ]
"""


def archive(path: Path, names: Sequence[str]) -> Path:
    """Write a zip with these members."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as made:
        for name in names:
            made.writestr(name, "x" * 100)
    return path


def folder(root: Path, config: str, names: Sequence[str] = SCRIPT, file: str = "model.pt") -> Path:
    """Write the folder of a model `net` with one version."""
    archive(root / "net/1" / file, names)
    (root / "net/config.pbtxt").write_text(config)
    return root
