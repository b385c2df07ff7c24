"""Write the skeleton of a new loss: copy an existing loss, under another name, in every file that a loss needs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
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
    """The result of writing a skeleton.

    Attributes:
        written: the written files, relative to the checkout.
        left: the remaining steps for the author, in order.
    """

    written: tuple[str, ...]
    left: tuple[str, ...]


def new_loss(name: str, like: str, source: str, top: Path | None = None) -> NewLoss:
    """Write a loss that is a copy of an existing one, as a starting point.

    Args:
        name: short name of the new loss.
        like: short name of the existing loss, whose arguments, options and formula are copied.
        source: where the new loss is published.
        top: folder of the checkout; by default the one with the installed fixtures.

    Returns:
        The written files, and the remaining steps.

    Raises:
        UsageError: A name is invalid, exists already or is unknown, or the folder is not a checkout.
    """
    top = fixtures_root().parent if top is None else top
    if like not in LOSSES:
        raise UsageError(f"--like: unknown loss {like!r}; known: {', '.join(LOSSES)}")
    if not re.fullmatch("[a-z][a-z0-9]*(_[a-z0-9]+)*", name):
        raise UsageError(f"NAME: expected lower-case words and digits joined by underscores, got {name!r}")
    if name in LOSSES or (top / f"reference/{name}.py").exists():
        raise UsageError(f"NAME: {name} exists; choose another name")
    if not (top / CATALOGUE).is_file():
        raise UsageError(f"{top} is not a checkout of pairproof; run this command in an editable install of a checkout")
    old = LOSSES[like]
    words = "".join(part.capitalize() for part in name.split("_"))
    new = replace(old, name=name, module=name, module_class=f"{words}Loss", source=source, variant={})
    texts = dict(_code(top, old, new))
    for path, text in texts.items():
        write_atomically(top / path, text)
    with registered(new):
        _fixtures(top / "fixtures", old, new)
        tables = renew(top, name)
    return NewLoss(
        written=(*texts, f"fixtures/{new.golden_file}", f"fixtures/{golden.ERRORS}", *tables),
        left=(
            f"{CATALOGUE}: the keywords, and the baseline, which is still that of {like}",
            f"reference/{name}.py: the formula {name}_anchor, its equation and the documentation",
            f"fast/{name}.py: the rule, the equation and the documentation",
            "make format lint types test",
            f"cases: pairproof fixtures add --loss {name} ...",
        ),
    )


def _code(top: Path, old: Loss, new: Loss) -> Iterator[tuple[str, str]]:
    """Yield the path and text of every source file that is new or changed."""
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
    """Return the ``register`` statement of the new loss, copied from the old loss."""
    changed = {name: f'"{getattr(new, name)}"' for name in ("name", "module", "module_class", "source")}
    calls = [node for node in ast.walk(ast.parse(catalogue)) if isinstance(node, ast.Call)]
    losses = [{word.arg: word.value for word in call.keywords} for call in calls if ast.unparse(call.func) == "Loss"]
    (parts,) = [one for one in losses if ast.unparse(one["name"]) == repr(old.name)]
    given = {name: ast.get_source_segment(catalogue, part) for name, part in parts.items()}
    lines = [f"        {name}={changed.get(str(name), value)}," for name, value in given.items() if name != "variant"]
    return "\n".join(["register(", "    Loss(", *lines, "    )", ")", ""])


def _copied(folder: Path, module: str, wanted: Sequence[str], renamed: Iterable[str]) -> tuple[list[str], str]:
    """Return the imports that definitions need when copied to another module, and the source of the definitions."""
    text = (folder / f"{module}.py").read_text(encoding="utf-8")
    tree = ast.parse(text)
    defined: dict[str, ast.stmt] = {getattr(node, "name", ""): node for node in tree.body}
    defined |= {ast.unparse(node.targets[0]): node for node in tree.body if isinstance(node, ast.Assign)}
    copied = [defined[name] for name in wanted]
    used = {node.id for part in copied for node in ast.walk(part) if isinstance(node, ast.Name)}.difference(renamed)
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
    starts = [min(node.lineno for node in (part, *getattr(part, "decorator_list", []))) for part in copied]
    bodies = ["\n".join(lines[first - 1 : part.end_lineno]) for first, part in zip(starts, copied, strict=True)]
    return imports, "\n\n\n".join(bodies)


def _exported(text: str, module: str, names: Sequence[str]) -> str:
    """Add imports and exports to the text of an ``__init__.py``; ``make format`` sorts them."""
    line = f"from .{module} import {', '.join(names)}\n"
    text = re.sub(r"^(?=from \.)", line, text, count=1, flags=re.MULTILINE)
    return text.replace("__all__ = [\n", "__all__ = [\n" + "".join(f'    "{name}",\n' for name in names))


def _fixtures(root: Path, old: Loss, new: Loss) -> None:
    """Write an empty golden file, and copy the error cases of the old loss."""
    write_atomically(root / new.golden_file, dump_json(golden.file_of(new, [])))
    errors = read_json(root, golden.ERRORS)
    errors["good"][new.name] = errors["good"][old.name]
    for case in errors["cases"]:
        case["losses"] += [new.name] * (old.name in case["losses"])
    write_atomically(root / golden.ERRORS, dump_json(errors))
    write_manifest(root)
