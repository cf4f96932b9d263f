"""Writes the tables of the code into the pages of docs/ and CONTRIBUTING.md, and checks that they agree.

`make docs` writes them between the markers, `make check` compares.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import rooms

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
import config_mutations
import dcp_scenarios
import export_results
import resumed
import strict_exports
from families import FAMILIES
from writers_tried import TRIED

import ckptcore
from ckptcore.checking.export_proof import CHECKS
from ckptcore.errors import FINDINGS, error_classes
from ckptcore.formats import FORMATS, KNOWN
from ckptcore.naming.maps import live_families
from ckptcore.naming.maps.declaration import built_in_maps
from ckptcore.naming.trainer_keys import KINDS_OF_KEYS
from ckptcore.naming.worlds import GENERATIONS, HUB
from tests.simulation.mutants import MUTANTS
from tests.simulation.scheduler import FAULTS
from tests.simulation.themes import THEMES

ROOT = Path(__file__).parents[2]
SLOT = re.compile(r"(?<=<!-- table: )(\w+)( -->\n)(.*?)(?=<!-- end -->)", re.DOTALL)


def tables() -> dict[str, dict[str, str]]:
    """Every generated table by page, and by the name in its marker."""
    return {
        "CONTRIBUTING.md": {"rooms": rooms.table(rooms.measure())},
        "docs/explanation/simulation.md": {
            "simulated_faults": simulated_faults(),
            "simulated_programs": simulated_programs(),
            "known_faults": known_faults(),
        },
        "docs/reference/families.md": {
            "sources": sources(),
            "families": families(),
            "ways_back": ways_back(),
        },
        "docs/how-to/verify.md": {"checks": checks(), "wrong_exports": wrong_exports(), "configs": configs()},
        "docs/reference/dcp-scenarios.md": scenarios(),
        "docs/reference/resumed-jobs.md": resumes(),
        "docs/reference/formats.md": {"formats": formats(), "tried": tried()},
        "docs/reference/errors.md": {"errors": errors()},
        "docs/reference/findings.md": {"findings": findings()},
        "docs/reference/training-state.md": {"training_state": training_state()},
        "docs/reference/strict-exports.md": strict(),
        "docs/reference/live-modules.md": {"transforms": transforms(), "live_models": live_models()},
    }


def formats() -> str:
    """The support matrix, then the names that are recognised only to be refused."""
    rows = [
        (
            f"`{fmt.name}`",
            fmt.title,
            fmt.recognised_by,
            yes_or_no(fmt.abilities.reads),
            yes_or_no(fmt.abilities.writes),
            fmt.abilities.checksums,
            yes_or_no(fmt.abilities.objects),
        )
        for fmt in FORMATS
    ]
    head = ("format", "what it is", "recognised by", "read", "write", "own checksums", "objects")
    refused = "".join(f"- `{known.name}`: {known.title}\n" for known in KNOWN)
    return table(head, rows) + f"\nRecognised by name, and refused with the next step:\n\n{refused}"


def tried() -> str:
    """The writers and versions that every format was read from, what is proven, and what is not."""
    assert TRIED.keys() == {fmt.name for fmt in FORMATS}, (
        "give each format a row in tests/helpers/writers_tried.py"
    )
    head = ("format", "versions of the writer", "what is proven", "what is not")
    return table(head, [(f"`{fmt.name}`", *TRIED[fmt.name]) for fmt in FORMATS])


def simulated_faults() -> str:
    """What befalls simulated processes, and what is assumed."""
    rows = [(f"`{name}`", kind.means, kind.assumes) for name, kind in FAULTS.items()]
    return table(("fault", "what happens", "what is assumed"), rows)


def simulated_programs() -> str:
    """What programs are about."""
    rows = [(f"`{name}`", str(theme.often), theme.means) for name, theme in THEMES.items()]
    return table(("theme", "of a hundred", "what its programs are about"), rows)


def known_faults() -> str:
    """What is restored into the product, and which program finds it."""
    rows = []
    for name, mutant in MUTANTS.items():
        pieces = dict.fromkeys((mutant.where, *(piece[0] for piece in mutant.also)))
        where = ", ".join(f"`{piece}`" for piece in pieces)
        seed = "" if mutant.seed is None else str(mutant.seed)
        rows.append((f"`{name}`", mutant.what, where, seed))
    return table(("fault", "what is wrong", "where", "seed"), rows)


def checks() -> str:
    """What `verify-export` asks."""
    return table(("check", "what it asks"), [(f"`{name}`", asks) for name, asks in CHECKS.items()])


def wrong_exports() -> str:
    """Which way of verifying finds which change of a right export."""
    ways = config_mutations.MISSES
    rows = [("tensors: two swapped, one rounded, one element negated, rows shifted", *["found"] * len(ways))]
    rows += [
        (kind, *("named" if kind in misses else "found" for misses in ways.values()))
        for kind in config_mutations.KINDS
    ]
    return table(("what is changed", *ways), rows)


def configs() -> str:
    """Which fields of a config.json are compared with which of a trainer's config."""
    folder = ROOT / "ckptcore/naming/maps"
    keys = tomllib.loads((folder / "numbers.toml").read_text("utf-8"))
    moved = tomllib.loads((folder / "hub_config.toml").read_text("utf-8"))["place"]
    worlds = [world for world in keys if world != HUB]
    rows = []
    for name, fields in {**keys[HUB], **keys[HUB]["terms"]}.items():
        if name in ("null", "terms"):
            continue
        hub = [
            p
            for f in fields
            if not f.startswith("|")
            for p in (f, *(o for o, new in moved.items() if new == f))
        ]
        of = [keys[w].get(name) or keys[w].get("terms", {}).get(name, []) for w in worlds]
        flags = [[f for f in keys[w].get("flags", {}).get(name, {}) if f] for w in worlds]
        if any(of):
            cells = [hub, *([*a, *b] for a, b in zip(of, flags, strict=True))]
            rows.append(tuple(", ".join(f"`{p}`" for p in c if not p.startswith("|")) for c in cells))
    return table(("config.json", *worlds), rows)


def errors() -> str:
    """Every error class in the order of exit codes."""
    # A class may be defined beside its one user; it exists once that module is imported.
    for module in pkgutil.walk_packages(ckptcore.__path__, "ckptcore."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    rows = [
        (
            str(cls.exit_code),
            f"`{cls.code}`",
            (cls.__doc__ or "").strip().splitlines()[0],
            yes_or_no(cls.transient),
            cls.default_hint,
        )
        for cls in error_classes()
    ]
    return table(("exit code", "error", "meaning", "retry", "next step"), rows)


def findings() -> str:
    """Every finding code in the order of the code's table."""
    rows = [(f"`{code}`", severity, meaning, hint) for code, (severity, meaning, hint) in FINDINGS.items()]
    return table(("finding", "severity", "meaning", "next step"), rows)


def training_state() -> str:
    """Keys of training state, with their sources."""
    rows = [
        (
            kind,
            keys.of,
            *(" ".join(f"`{k}`" for k in ks) for ks in (keys.telling, keys.ambiguous)),
            keys.source,
        )
        for kind, of_kind in KINDS_OF_KEYS.items()
        for keys in of_kind
    ]
    return table(("kind", "classes", "keys that prove the class", "other keys", "source"), rows)


def sources() -> str:
    """What exports are made of."""
    return table(("source", "what it is"), [(f"`{n}`", what) for n, what in export_results.SOURCES.items()])


def families() -> str:
    """What comes of the export of every family from every source."""
    head = ("family", *(f"`{s}`" for s in export_results.SOURCES), "transformers 4.57")
    return table(head, map(export_results.row, FAMILIES))


def ways_back() -> str:
    """Which maps lead from the hub to which names of a trainer, and whose code has loaded the result."""
    rows: dict[tuple[str, str], tuple[str, ...]] = {}
    for each in built_in_maps():
        if why := each.refused:
            rows[each.arch, each.world] = f"`{each.arch}`", f"`{each.world}`", "", f"refused ({why})"
            continue
        of_hub = [g for g in each.generations if g in GENERATIONS.get(each.world, ())]
        if each.generations and not of_hub:
            continue  # names that are only read
        back = each.inverted()
        names = [f"`{g}`" for g in of_hub]
        _, _, before, _ = rows.get((each.arch, each.world), ("", "", "", ""))
        names = [n for n in (before, *names) if n]
        loaded = back.loaded_by or "no code yet: `--allow-untried`"
        rows[each.arch, each.world] = f"`{each.arch}`", f"`{each.world}`", ", ".join(names), loaded
    return table(("family", "`--names`", "generations, the default first", "loaded by"), list(rows.values()))


def strict() -> dict[str, str]:
    """What was compared with what transformers saves, from which source, and what transformers 4.57 opens."""
    own, older = strict_exports.versions()
    declared = strict_exports.rows()
    compared = {kind: row for kind, row in declared.items() if not row.left_out}
    counts = Counter(row.source for row in compared.values())
    made = [(f"`{n}`", what, str(counts[n])) for n, (what, _) in strict_exports.SOURCES.items()]
    columns: dict[str, dict[str, list[str]]] = {"opened": {}, "differs": {}, "left_out": {}}
    for kind, row in declared.items():
        if row.left_out:
            columns["left_out"].setdefault(row.left_out, []).append(kind)
            continue
        columns["differs"].setdefault(row.differs or strict_exports.EQUAL, []).append(kind)
        keys = row.older[:1].isdigit()
        columns["opened"].setdefault(strict_exports.OTHER_KEYS if keys else row.older, []).append(kind)

    def by_reason(title: str, column: str) -> str:
        rows = sorted(columns[column].items(), key=lambda of: -len(of[1]))
        return table((title, "types", "which"), [(why, str(len(of)), _named(of)) for why, of in rows])

    return {
        "strict_sources": table(("source", "what it is", "types"), made),
        "strict_results": f"transformers {own}.\n\n" + by_reason("names, dtypes, shapes, bytes", "differs"),
        "strict_older": f"transformers {older}.\n\n" + by_reason("what it does with the export", "opened"),
        "strict_left_out": by_reason("why", "left_out"),
        "strict_engine": f"vLLM {strict_exports.VLLM}, on a CPU.\n\n"
        + table(
            ("model type", "kind", "weights"),
            [(f"`{of.model_type}`", of.kind, of.dtype) for of in strict_exports.ENGINE.values()],
        ),
    }


def transforms() -> str:
    """How many of transformers' transforms became steps, by what they are made of."""
    counts: dict[str, Counter[str]] = {}
    entries: dict[str, set[str]] = {}
    for entry in live_families.frozen_entries():
        for step in live_families.frozen_steps(entry):
            name = ", ".join(f"`{c}`" for c in step.made_of)
            kind = "refused" if step.refused else "joins" if step.rule else "renames"
            counts.setdefault(name, Counter())[kind] += 1
            entries.setdefault(name, set()).add(entry)
    kinds = ("renames", "joins", "refused")
    rows = [
        (name, str(len(entries[name])), *(str(counts[name][k] or "") for k in kinds))
        for name in sorted(counts, key=lambda n: (-counts[n].total(), n))
    ]
    every = [str(sum(c[k] for c in counts.values())) for k in kinds]
    total = ("all", str(len(live_families.frozen_entries())), *every)
    head = ("class in transformers", "entries", "names only", "rule between tensors", "refused")
    return f"transformers {live_families.frozen_version()}.\n\n" + table(head, [*rows, total])


def live_models() -> str:
    """How many model types and classes are known, and which have no map or none back."""
    kinds: dict[str, set[str]] = {"files hold what the module has": set(), "mapped, both ways": set()}
    known: dict[str, int] = Counter()
    for form in live_families.frozen_families():
        steps = [s for p in form.parts for s in live_families.frozen_steps(p.entry)]
        reasons = [s.refused for s in steps if s.refused] or [
            f"one way: {s.rule.one_way}" for s in steps if s.rule and s.rule.one_way
        ]
        kind = reasons[0] if reasons else "mapped, both ways" if steps else "files hold what the module has"
        kinds.setdefault(kind, set()).add(form.arch)
        known[kind] += len(form.architectures)
    rows = [
        (kind, str(len(kinds[kind])), str(known[kind]), _named(kinds[kind]) if n > 1 else "")
        for n, kind in enumerate(kinds)
    ]
    return table(("what becomes of a module", "model types", "classes", "which"), rows)


def _named(names: Iterable[str]) -> str:
    return ", ".join(f"`{n}`" for n in sorted(names))


def scenarios() -> dict[str, str]:
    """The scenarios of PyTorch's tests, and the closed tables of what differs."""
    head = ("scenario", "saved, and loaded into", "ranks", "PyTorch's tests of it", "`make test`")
    found = {
        f"dcp_{topic}": table(
            head,
            [
                (f"`{s.name}`", s.what, str(s.ranks), s.upstream, "yes" if s.short else "")
                for s in dcp_scenarios.SCENARIOS
                if s.topic == topic
            ],
        )
        for topic in dcp_scenarios.TOPICS
    }
    others = ("scenario", "why torch has no result", "compared with")
    return found | {
        "dcp_not_run": table(("PyTorch's tests", "why they have no scenario"), dcp_scenarios.NOT_RUN),
        "dcp_torch_fails": table(
            others, [(f"`{n}`", why, what) for n, why, what in dcp_scenarios.TORCH_FAILS]
        ),
        "dcp_not_rewritten": table(
            ("scenario", "what changes"),
            [
                (", ".join(f"`{n}`" for n in names.split(", ")), what)
                for names, what in dcp_scenarios.NOT_REWRITTEN
            ],
        ),
    }


def resumes() -> dict[str, str]:
    """What trainers' own code has loaded, and what is missing."""
    head = ("written as", "loaded by", "saved on", "written for, loaded on", "compared", "needs", "test")
    rows = [
        (f"`{r.output}`", r.by, r.saved, r.on, r.compared, r.needs, f"`{r.test.partition('::')[2]}`")
        for r in resumed.ROWS
    ]
    return {"resumed": table(head, rows), "resumed_missing": table(("not resumed", "why"), resumed.MISSING)}


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A markdown table; a cell's bars are escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(map(escaped, cells)) + " |\n" for cells in lines)


def escaped(cell: str) -> str:
    return cell.replace("|", "\\|")


def yes_or_no(ability: bool) -> str:
    return "yes" if ability else "no"


def filled(text: str, made: Mapping[str, str]) -> str:
    """The text with every marked table made anew.

    Raises ValueError when a table has no marker or a marker no table.
    """
    marked = [match[1] for match in SLOT.finditer(text)]
    if sorted(marked) != sorted(made):
        raise ValueError(f"the page marks the tables {marked}, the code makes {sorted(made)}")
    return SLOT.sub(lambda match: f"{match[1]}{match[2]}\n{made[match[1]]}\n", text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", nargs="?", type=Path, default=ROOT, help="the folder of the pages")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true", help="fill the tables in")
    action.add_argument("--check", action="store_true", help="exit with 1 when a table drifted")
    arguments = parser.parse_args()
    drifted = 0
    for name, made in tables().items():
        page = arguments.root / name
        text = page.read_text(encoding="utf-8")
        wanted = filled(text, made)
        if wanted == text:
            continue
        if arguments.check:
            print(f"{name}: a generated table drifted; run `make docs`", file=sys.stderr)
            drifted = 1
        else:
            page.write_text(wanted, encoding="utf-8")
    return drifted


if __name__ == "__main__":
    sys.exit(main())
