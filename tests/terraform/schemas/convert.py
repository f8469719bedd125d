"""A package `@cdktf/provider-*` from npm -> what `terraform providers schema -json` prints, for the types wanted.

The JavaScript that is generated for a resource names every argument as Terraform does, says whether it is a block, what
collection and of what; the .d.ts beside it tells required from optional. What the package does not tell, and so
neither does this: whether an optional argument is also computed, what is sensitive or write-only, numbers of blocks
but 0 and 1, defaults, and what the provider itself checks (networks, words, conflicts). tests/terraform/rules says
some of that.

How exact: held against the AWS provider 5.100.0 (1526 resources, 608 data sources, 38133 names) the conversion of all
of it had no name missing or too many, 21 attributes and blocks mixed up, 5 types and 2 "required" wrong. The other
providers: not measured.
"""

import json
import re
import tarfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

_GETTERS = {
    "getStringAttribute": "string",
    "getNumberAttribute": "number",
    "getBooleanAttribute": "bool",
    "getListAttribute": ["list", "string"],
    "getStringMapAttribute": ["map", "string"],
    "getNumberMapAttribute": ["map", "number"],
    "getBooleanMapAttribute": ["map", "bool"],
    "getAnyMapAttribute": ["map", "dynamic"],
    "getNumberListAttribute": ["list", "number"],
    "interpolationForAttribute": "dynamic",
}
_COLLECTIONS = {
    "StringMap": ["map", "string"],
    "NumberMap": ["map", "number"],
    "BooleanMap": ["map", "bool"],
    "AnyMap": ["map", "dynamic"],
    "StringMapList": ["list", ["map", "string"]],
    "NumberMapList": ["list", ["map", "number"]],
    "BooleanMapList": ["list", ["map", "bool"]],
    "StringListList": ["list", ["list", "string"]],
    "NumberListList": ["list", ["list", "number"]],
}
_WORDS = {"string": "string", "number": "number", "boolean": "bool", "any": "dynamic"}

# Where the packages are lossy: nested attributes that they call blocks, and a dynamic attribute that they call a map.
_ATTRIBUTES_NOT_BLOCKS = {
    "helm": ["kubernetes", "registries", "experiments"],  # the provider's own configuration
    "helm_release": ["set", "set_list", "set_sensitive", "set_wo", "postrender"],
    "data.helm_template": ["set", "set_list", "set_sensitive", "postrender"],
}
_DYNAMIC = {"kubernetes_manifest": ["manifest", "object"]}

_ARGUMENT = re.compile(
    r"^ +(\w+): \{\n +value: (.*?),\n +isBlock: (true|false),\n +type: \"(\w+)\",\n"
    r" +storageClassType: \"(\w+)\",\n +\}",
    re.S | re.M,
)
_GET = re.compile(r"get (\w+)\(\) \{\n\s+return (cdktf\.Fn\.tolist\()?(?:cdktf\.Token\.\w+\()?this\.(\w+)\('(\w+)'\)")
_NEW = re.compile(
    r"// (\w+) - computed: (true|false), optional: (true|false), required: (true|false)\n"
    r"\s+this\.\w+ = new (cdktf\.)?(\w+)\(this, \"(\w+)\"(?:, (true|false))?\)"
)
_FILE = re.compile(r"package/lib/([\w-]+)/(?:index-structs/)?[\w-]+\.(js|d\.ts)")
_BASES = {"TerraformResource": "", "TerraformDataSource": "data.", "TerraformProvider": "provider"}


def converted(package: Path, wanted: Collection[str]) -> dict[str, Any]:
    """The document of a package's .tgz with the types wanted ("aws_vpc", "data.aws_region"), where it has them."""
    texts: dict[str, dict[str, str]] = {}
    meta: dict[str, Any] = {}
    with tarfile.open(package) as archive:
        for member in archive:
            found = _FILE.fullmatch(member.name)
            if member.name == "package/package.json":
                meta = json.load(archive.extractfile(member))  # type: ignore[arg-type]
            elif found:
                text = archive.extractfile(member).read().decode()  # type: ignore[union-attr]
                folder = texts.setdefault(found[1], {"js": "", "d.ts": ""})
                folder[found[2]] += text
    schemas: dict[str, Any] = {"provider": None, "resource_schemas": {}, "data_source_schemas": {}}
    shorts = {name.removeprefix("data.") for name in wanted}
    for folder_name, text in sorted(texts.items()):
        # All of it takes minutes: only what may be wanted is looked at closely.
        if folder_name != "provider" and not shorts.intersection(
            re.findall("terraformResourceType: '(\\w+)'", text["js"])
        ):
            continue
        for name, schema in _Module(text["js"], text["d.ts"]).schemas():
            _correct("helm" if name == "provider" and "-helm" in meta["name"] else name, schema["block"])
            if name == "provider":
                schemas["provider"] = schema
            elif name in wanted:
                kind = "data_source_schemas" if name.startswith("data.") else "resource_schemas"
                schemas[kind][name.removeprefix("data.")] = schema
    provider = meta["cdktf"]["provider"]
    source = {
        "npm": f"{meta['name']}@{meta['version']}",
        "provider_version": provider["version"],
        "license": meta["license"],
    }
    return {"format_version": "1.0", "source": source, "provider_schemas": {provider["name"]: schemas}}


def _correct(name: str, block: dict[str, Any]) -> None:
    for nested in _ATTRIBUTES_NOT_BLOCKS.get(name, ()):
        if nested in block["block_types"]:
            block["attributes"][nested] = _as_attribute(block["block_types"].pop(nested))
    for attribute in _DYNAMIC.get(name, ()):
        block["attributes"][attribute]["type"] = "dynamic"


def _as_attribute(nested: dict[str, Any]) -> dict[str, Any]:
    attributes = dict(nested["block"]["attributes"])
    attributes |= {name: _as_attribute(each) for name, each in nested["block"].get("block_types", {}).items()}
    need = {"required": True} if nested.get("min_items") else {"optional": True}
    return {"nested_type": {"nesting_mode": nested["nesting_mode"], "attributes": attributes}, **need}


def _plain_type(kind: str, storage: str) -> Any:
    """The cty type of `type` and `storageClassType` where they are primitives and collections of them, else None."""
    found = re.fullmatch(r"(string|number|boolean|any)((?:List|Map|Set)*)", storage)
    if found is None:
        return None
    cty: Any = _WORDS[found[1]]
    kinds = re.findall("List|Map|Set", found[2])
    for index, word in enumerate(kinds):
        outermost = index == len(kinds) - 1
        cty = [kind if outermost and kind in ("list", "set", "map") else word.lower(), cty]
    return cty


class _Module:
    """One folder of the package: its functions, classes and interfaces by their names."""

    def __init__(self, js: str, dts: str) -> None:
        js = re.sub(r"\(0, \w+_\d+\.(\w+)\)", r"\1", js)  # of a module in parts: (0, structs0_1.fooToHcl)(x)
        js = re.sub(r"\b(?:index_)?structs\d*_\d+\.", "", js)
        functions = re.finditer(r"^function (\w+)ToHclTerraform\(struct\) \{\n(.*?)^\}", js, re.S | re.M)
        self._functions = {found[1]: found[2] for found in functions}
        classes = re.finditer(r"^class (\w+) extends cdktf\.(\w+) \{\n(.*?)^\}", js, re.S | re.M)
        self._classes = {found[1]: (found[2], found[3]) for found in classes}
        self._required: dict[str, dict[str, bool]] = {}  # interface -> its property -> whether it must be given
        for found in re.finditer(r"^export interface (\w+)[^{]*\{\n(.*?)^\}", dts, re.S | re.M):
            body = re.sub(r"/\*.*?\*/", "", found[2], flags=re.S)
            properties = re.findall(r"^ +readonly (\w+)(\??):", body, re.M)
            self._required[found[1]] = {name: not optional for name, optional in properties}

    def schemas(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """(aws_vpc, data.aws_region or provider; its schema)."""
        for name, (base, body) in self._classes.items():
            if base not in _BASES:
                continue
            found = re.search(r"terraformResourceType: '(\w+)'", body)
            written = re.search(r"synthesizeHclAttributes\(\) \{\n(.*)", body, re.S)
            block = self._block(written[1] if written else "", body, self._required.get(f"{name}Config", {}))
            if base == "TerraformProvider":
                block["attributes"].pop("alias", None)
            type_name = "provider" if base == "TerraformProvider" else _BASES[base] + (found[1] if found else name)
            yield type_name, {"version": 0, "block": block}

    def _block(self, written: str, body: str, required: dict[str, bool]) -> dict[str, Any]:
        attributes: dict[str, Any] = {}
        blocks: dict[str, Any] = {}
        objects = {found[7]: found for found in _NEW.finditer(body)}
        for name, value, is_block, kind, storage in _ARGUMENT.findall(written):
            prop = re.search(r"(?:struct|this)\.(_?\w+)", value)
            must = required.get(prop[1].lstrip("_") if prop else name, False)
            need: dict[str, Any] = {"required": True} if must else {"optional": True}
            made = objects.get(name)
            computed = {"computed": True} if made and made[2] == "true" else {}
            plain = _plain_type(kind, storage)
            if plain is not None:
                attributes[name] = {"type": plain, **need, **computed}
            elif is_block == "true" and made and computed:
                # A block cannot be computed: this is an attribute that may be written like one.
                attributes[name] = {"type": self._type_of(made), **(need if must else need | computed)}
            elif is_block == "true":
                blocks[name] = self._nested(value, kind, must)
            else:
                inner = self._nested(value, kind, must)
                nested = inner["block"]["attributes"] | {
                    key: _as_attribute(each) for key, each in inner["block"]["block_types"].items()
                }
                shape = {"nesting_mode": inner["nesting_mode"], "attributes": nested}
                attributes[name] = {"nested_type": shape, **need, **computed}
        for found in _GET.finditer(body):  # what can only be read
            if not found[1].endswith("Input") and found[3] in _GETTERS and found[4] not in attributes | blocks:
                cty = ["set", "string"] if found[2] else _GETTERS[found[3]]
                attributes[found[4]] = {"type": cty, "computed": True}
        for name, made in objects.items():
            if name not in attributes and name not in blocks:
                attributes[name] = {"type": self._type_of(made), "computed": True}
        return {"attributes": attributes, "block_types": blocks}

    def _nested(self, value: str, kind: str, must: bool) -> dict[str, Any]:
        """The block that `value` writes; `kind`: struct (one), list, set or map."""
        struct = re.search(r"(\w+)ToHclTerraform\b", re.sub(r"cdktf\.\w+", "", value))
        block: dict[str, Any] = {"attributes": {}, "block_types": {}}
        if struct:
            upper = struct[1][0].upper() + struct[1][1:]
            body = self._classes.get(f"{upper}OutputReference", ("", ""))[1]
            block = self._block(self._functions.get(struct[1], ""), body, self._required.get(upper, {}))
        nested: dict[str, Any] = {"nesting_mode": "single" if kind == "struct" else kind, "block": block}
        if nested["nesting_mode"] in ("list", "set"):
            if must:
                nested["min_items"] = 1
            if "listMapperHcl(" not in value and "hashMapperHcl(" not in value:
                nested["max_items"] = 1
        return nested

    def _type_of(self, made: re.Match[str]) -> Any:
        """The cty type of `new Foo(this, "foo")`."""
        name = made[6]
        if made[5]:
            return _COLLECTIONS.get(name, "dynamic")
        if name.endswith("OutputReference"):
            return self._object_type(name)
        collection = "map" if self._classes.get(name, ("", ""))[0] == "ComplexMap" else "list"
        if collection == "list" and made[8] == "true":
            collection = "set"
        return [collection, self._object_type(re.sub(r"(List|Map)$", "", name) + "OutputReference")]

    def _object_type(self, name: str) -> Any:
        body = self._classes.get(name, ("", ""))[1]
        shape = {
            found[4]: ["set", "string"] if found[2] else _GETTERS[found[3]]
            for found in _GET.finditer(body)
            if not found[1].endswith("Input") and found[3] in _GETTERS
        }
        return ["object", shape | {found[7]: self._type_of(found) for found in _NEW.finditer(body)}]
