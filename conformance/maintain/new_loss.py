"""The skeleton of a new loss: a copy of one of the catalogue under another name, in every place that a loss has."""

from __future__ import annotations

import ast
import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..judge.options import UsageError
from ..suite import golden
from ..suite.catalogue import LOSSES, Loss, registered
from ..suite.store import dump_json, fixtures_root, read_json, write_atomically, write_manifest
from .renew import renew

CATALOGUE = "conformance/suite/catalogue.py"


@dataclass(frozen=True)
class NewLoss:
    """What was written.

    Attributes:
        written: the files, relative to the checkout.
        left: what is left to do, in order.
    """

    written: tuple[str, ...]
    left: tuple[str, ...]


def new_loss(name: str, like: str, source: str, top: Path | None = None) -> NewLoss:
    """Write a loss that computes what another one does, ready to be changed.

    Args:
        name: short name of the new loss.
        like: short name of the loss that is copied: its arguments, its options and its formula.
        source: where the new loss is published.
        top: the checkout; by default the one that holds the installed fixtures.

    Returns:
        The files, and what is left to do.

    Raises:
        UsageError: a name is taken, unknown or not a name, or this is not a checkout.
    """
    top = fixtures_root().parent if top is None else top
    if like not in LOSSES:
        raise UsageError(f"--like: unknown loss {like!r}; known: {', '.join(LOSSES)}")
    if not re.fullmatch("[a-z][a-z0-9]*(_[a-z0-9]+)*", name):
        raise UsageError(f"NAME: expected small letters and digits joined by underscores, got {name!r}")
    if name in LOSSES or (top / f"reference/{name}.py").exists():
        raise UsageError(f"NAME: {name} exists")
    if not (top / CATALOGUE).is_file():
        raise UsageError(f"{top} is not a checkout of pairproof: a loss is added to its source")
    old = LOSSES[like]
    words = "".join(part.capitalize() for part in name.split("_"))
    new = replace(old, name=name, module=name, module_class=f"{words}Loss", source=source, variant={})
    texts = dict(_code(top, old, new))
    for path, text in texts.items():
        write_atomically(top / path, text)
    with registered(new):
        _fixtures(top / "fixtures", old, new)
        tables = renew(top, name)
    written = (CATALOGUE, f"reference/{name}.py", f"fast/{name}.py")
    others = dict.fromkeys((*texts, f"fixtures/{new.golden_file}", f"fixtures/{golden.ERRORS}", *tables))
    return NewLoss(
        written=(*written, *(path for path in others if path not in written)),
        left=(
            f"{written[0]}: its keywords, and a baseline of its own; it has that of {like}",
            f"{written[1]}: the formula {name}_anchor, its equation, the documentation",
            f"{written[2]}: the rule, the equation, the documentation",
            "make format lint types test",
            f"cases: pairproof fixtures add --loss {name} ...",
        ),
    )


def _code(top: Path, old: Loss, new: Loss) -> Iterator[tuple[str, str]]:
    """The text of every source file that is new or changed."""
    catalogue = (top / CATALOGUE).read_text(encoding="utf-8")
    yield CATALOGUE, f"{catalogue.rstrip()}\n{_entry(catalogue, old, new)}"
    names = {f"{old.name}_loss": f"{new.name}_loss", f"{old.name}_anchor": f"{new.name}_anchor"}
    names[old.module_class] = new.module_class
    head = f'"""{new.name}: {new.source}."""\n\nfrom __future__ import annotations\n\n'
    for package, wanted in (("reference", list(names)[1::-1]), ("fast", list(names)[:1])):
        pieces = [_copied(top / package, old.module, wanted, names)]
        public = [f"{new.name}_loss"]
        if package == "fast":
            pieces.append(_copied(top / package, "modules", [old.module_class], names))
            public.append(new.module_class)
        imports, bodies = zip(*pieces, strict=True)
        text = "\n".join(dict.fromkeys(line for lines in imports for line in lines)) + "\n\n\n" + "\n\n\n".join(bodies)
        for before, after in names.items():
            text = re.sub(rf"\b{before}\b", after, text)
        yield f"{package}/{new.name}.py", f"{head}{text}\n"
        path = f"{package}/__init__.py"
        yield path, _exported((top / path).read_text(encoding="utf-8"), new.name, public)


def _entry(catalogue: str, old: Loss, new: Loss) -> str:
    """The statement that registers the new loss, made of the old one's."""
    changed = {name: f'"{getattr(new, name)}"' for name in ("name", "module", "module_class", "source")}
    for node in ast.walk(ast.parse(catalogue)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Loss":
            given = {word.arg: ast.get_source_segment(catalogue, word.value) for word in node.keywords}
            if given["name"] == f'"{old.name}"':
                lines = [f"        {name}={changed.get(str(name), value)}," for name, value in given.items()]
                kept = [line for line in lines if not line.startswith("        variant=")]
                return "\n".join(["register(", "    Loss(", *kept, "    )", ")", ""])
    raise AssertionError(f"{CATALOGUE} does not register {old.name}")


def _copied(folder: Path, module: str, wanted: Sequence[str], renamed: Container[str]) -> tuple[list[str], str]:
    """Definitions of a module, and the imports that they need beside what is renamed in another one of its folder."""
    text = (folder / f"{module}.py").read_text(encoding="utf-8")
    tree = ast.parse(text)
    defined: dict[str, ast.stmt] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined[node.name] = node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            defined[node.targets[0].id] = node
    copied = [defined[name] for name in wanted]
    used = {
        node.id for part in copied for node in ast.walk(part) if isinstance(node, ast.Name) and node.id not in renamed
    }
    imports = []
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom) and ast.unparse(node) != "from __future__ import annotations":
            names = [alias for alias in node.names if (alias.asname or alias.name) in used]
            if names:
                node.names = names
                imports.append(ast.unparse(node))
    siblings = sorted(used & defined.keys())
    if siblings:
        imports.append(f"from .{module} import {', '.join(siblings)}")
    lines = text.splitlines()
    bodies = []
    for part in copied:
        decorators = getattr(part, "decorator_list", [])
        first = min([part.lineno, *(decorator.lineno for decorator in decorators)])
        bodies.append("\n".join(lines[first - 1 : part.end_lineno]))
    return imports, "\n\n\n".join(bodies)


def _exported(text: str, module: str, names: Sequence[str]) -> str:
    """The text of a package's ``__init__.py`` with the names of a module imported and listed."""
    line = f"from .{module} import {', '.join(sorted(names))}\n"
    imports = re.finditer(r"^from \.(\w+)[. ]", text, re.MULTILINE)
    place = next((found.start() for found in imports if found[1] > module), text.index("\n__all__"))
    text = text[:place] + line + text[place:]
    listed = ast.literal_eval(text[text.index("[", text.index("__all__")) :])
    order = sorted([*listed, *names], key=lambda name: (name[0].islower(), name))
    return text[: text.index("__all__")] + "__all__ = [\n" + "".join(f'    "{name}",\n' for name in order) + "]\n"


def _fixtures(root: Path, old: Loss, new: Loss) -> None:
    """An empty golden file, and in the error table the old loss's call and mistakes under the new name."""
    write_atomically(root / new.golden_file, dump_json(golden.file_of(new, [])))
    errors = read_json(root, golden.ERRORS)
    errors["good"][new.name] = errors["good"][old.name]
    for case in errors["cases"]:
        case["losses"] += [new.name] * (old.name in case["losses"])
    write_atomically(root / golden.ERRORS, dump_json(errors))
    write_manifest(root)
