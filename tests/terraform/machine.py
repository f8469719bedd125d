"""One machine in place of a cluster: it runs containers of a plan as processes."""

import os
import re
import shutil
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
from redis_server import binary

from oriel_cli.up.units import free_ports

from ..gateway.certificates import certificate
from .objects import Object

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
REPOSITORY = "s3://models.example/models"
KEY = "a-key-of-acme"
TLS_SECRET = "public-tls"


def tenants(*keys: str) -> dict[str, Any]:
    return {f"t{number}": {"tier": "gold", "keys_sha256": [digest(key)]} for number, key in enumerate(keys)}


def digest(key: str) -> str:
    return sha256(key.encode()).hexdigest()


class Machine:
    """One machine in place of a cluster. folder: holds what the pods' folders would."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ports: dict[int, int] = {}

    def port(self, planned: int) -> int:
        """Return where a port of a pod is here. Each port belongs to one pod only, so one table is enough."""
        if planned not in self._ports:
            (self._ports[planned],) = free_ports("127.0.0.1", 1)
        return self._ports[planned]

    def text(self, text: str) -> str:
        """Replace names and ports of Services in an argument, an environment or a document."""
        return re.sub(
            r"\b(gateway-internal|gateway|logic|inference-cpu|inference|redis):([0-9]+)\b",
            lambda match: f"localhost:{self.port(int(match[2]))}",
            text,
        ).replace("kubernetes:localhost:", "dns:localhost:")

    def mount(self, unit: str, template: Object, configs: dict[str, Object]) -> dict[str, Path]:
        """The pod's folders: path in the pod -> path here."""
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        mounts = {}
        for mount in template["spec"]["containers"][0]["volumeMounts"]:
            here = self.folder / unit / mount["mountPath"].lstrip("/")
            here.mkdir(parents=True, exist_ok=True)
            if "configMap" in volumes[mount["name"]]:
                self.publish(here, configs[volumes[mount["name"]]["configMap"]["name"]]["data"])
            elif volumes[mount["name"]].get("secret", {}).get("secretName") == TLS_SECRET:
                for name, made in zip(("tls.crt", "tls.key"), certificate(self.folder, "public"), strict=True):
                    shutil.copy(made, here / name)
            mounts[mount["mountPath"]] = here
        return mounts

    def publish(self, folder: Path, data: dict[str, str]) -> None:
        """As the kubelet writes a ConfigMap: a folder of its own, a link to it that is swapped, a link per file."""
        stamp = folder / f"..{len(list(folder.glob('..[0-9]*')))}"
        stamp.mkdir()
        for name, text in data.items():
            (stamp / name).write_text(self.text(text))
        swapped = folder / "..data_tmp"
        swapped.symlink_to(stamp.name)
        os.replace(swapped, folder / "..data")
        for name in data:
            if not (folder / name).is_symlink():
                (folder / name).symlink_to(f"..data/{name}")

    def command(self, unit: str, template: Object, mounts: dict[str, Path]) -> tuple[list[str], dict[str, str]]:
        """Return what the container runs, and its environment."""
        container = template["spec"]["containers"][0]

        def local(word: str) -> str:
            for inside, here in sorted(mounts.items(), key=lambda each: -len(each[0])):
                if word == inside or word.startswith(f"{inside}/"):
                    return f"{here}{word.removeprefix(inside)}"
            ours = {REPOSITORY: str(self.models()), "0.0.0.0": "127.0.0.1", "10.0.0.0/8": "127.0.0.0/8"}
            return ours.get(word, self.text(word))

        words = [local(word) for word in container["args"]]
        for port in container["ports"]:
            words += [f"--{port['name']}-port", str(self.port(port["containerPort"]))]
        environment = {
            each["name"]: local(each["value"]) if "value" in each else secret(each["valueFrom"])
            for each in container["env"]
        }
        return [sys.executable, "-P", "-m", "oriel_cli.main", unit.partition("-")[0], *words], environment

    def models(self) -> Path:
        """The examples, and beside them a model of which half is uploaded and one that is broken."""
        folder = self.folder / "repository"
        if not folder.is_dir():
            shutil.copytree(EXAMPLES / "models", folder)
            for name in ("half", "broken"):
                (folder / name / "1").mkdir(parents=True)
                (folder / name / "config.pbtxt").write_text(f'name: "{name}"\nbackend: "onnxruntime"\n')
            (folder / "broken" / "1" / "model.onnx").write_bytes(b"no model")
        return folder

    def redis(self, template: Object) -> list[str]:
        """Start the bundled Redis, in whatever version is installed here."""
        container = template["spec"]["containers"][0]
        assert container["command"] == ["redis-server"]
        passwords = {f"$({each['name']})": secret(each["valueFrom"]) for each in container["env"]}
        words = [passwords.get(word, word) for word in container["args"]]
        folder = self.folder / "redis"
        folder.mkdir()
        return [binary(), *words, "--dir", str(folder), "--port", str(self.port(6379))]

    def probe(self, template: Object, kind: str) -> str:
        asked = template["spec"]["containers"][0][kind]["httpGet"]
        (port,) = [
            each["containerPort"]
            for each in template["spec"]["containers"][0]["ports"]
            if each["name"] == asked["port"]
        ]
        return f"http://127.0.0.1:{self.port(port)}{asked['path']}"


def secret(source: Object) -> str:
    """Return the value that a Secret's key has on this machine."""
    ref = source["secretKeyRef"]
    return sha256(f"{ref['name']}/{ref['key']}".encode()).hexdigest()


async def answers(client: httpx.AsyncClient, url: str, status: int, **headers: str) -> bool:
    try:
        return (await client.get(url, headers=headers)).status_code == status
    except httpx.TransportError:
        return False
