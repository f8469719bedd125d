"""Write the `*_pb2` modules and stubs from the .proto files beside this one (needs grpcio-tools).

python -m oriel_wire.v2.proto.generate [DIRECTORY]     default: in place
"""

import sys
from pathlib import Path

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[2]


def generate(target: Path) -> None:
    """Generate below `target`, which becomes the root of the package. Raises RuntimeError if protoc fails."""
    from grpc_tools import protoc

    sources = sorted(str(path.relative_to(_ROOT)) for path in _HERE.glob("*.proto"))
    if protoc.main(["protoc", f"-I{_ROOT}", f"--python_out={target}", f"--pyi_out={target}", *sources]) != 0:
        raise RuntimeError("protoc failed, its messages are above")


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else _ROOT)
