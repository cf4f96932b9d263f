"""Choose the steps of a program: most programs go where guarantees meet, some go anywhere.

A step is a text, ``VERB[=PLACE[>PLACE]][+...][/FAULTS]``: what `tests.simulation.programs` does, in several
processes at once where there is a plus, and a row of `tests.simulation.scheduler.PROFILES`. Digits are
sources, letters are outputs. A theme draws its steps with a number alone, and knows no known fault.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

Draw = random.Random
Steps = list[str]
# Verb -> how often, where anything may happen.
ANYTHING = {
    "save": 5,
    "resave": 1,
    "make": 6,
    "together": 12,
    "copy": 3,
    "link": 1,
    "move": 3,
    "overwrite": 10,
    "resume": 4,
    "retire": 10,
    "purge": 4,
    "restore": 2,
    "scrub": 1,
    "away": 1,
    "rot": 1,
    "rewrite": 2,
    "validate": 2,
    "backup": 1,
    "rewind": 1,
    "lose": 1,
    "release": 1,
    "hold": 1,
}
FORGET = ("rewind", "lose")  # behind them less is promised, so half of the programs have none
CRASHES = ("kill", "kill", "kill@", "kill@", "power", "power@", "after", "error")


@dataclass(frozen=True)
class Theme:
    """A kind of program.

    Attributes:
        often: How many in a hundred programs are of it.
        means: What its programs are about, for the page.
        steps: Draws a program.
    """

    often: int
    means: str
    steps: Callable[[Draw], Steps]


def program(seed: int, length: int = 0, theme: str = "") -> list[tuple[str, int]]:
    """Return a random program. length: of it, at most; 0 for its own. theme: of it; else any."""
    draw = random.Random(seed)
    (any_theme,) = draw.choices(list(THEMES), [theme.often for theme in THEMES.values()])
    theme = theme or any_theme
    steps = THEMES[theme].steps(draw)
    if draw.random() < 0.15:
        steps.insert(draw.randint(4, len(steps)), _anything(draw))
    return [(step, draw.getrandbits(40)) for step in steps][: length or None]


def theme_of(seed: int) -> str:
    """Return the theme of a seed's program."""
    (theme,) = random.Random(seed).choices(list(THEMES), [theme.often for theme in THEMES.values()])
    return theme


def _anything(draw: Draw, *, forgets: bool = True) -> str:
    weights = {verb: often for verb, often in ANYTHING.items() if forgets or verb not in FORGET}
    (verb,) = draw.choices(list(weights), list(weights.values()))
    return verb


def _start(*steps: str) -> Steps:
    return [f"{step}/setup" for step in ("save", "save", "validate=2", *steps)]


def _crash(draw: Draw, step: str) -> str:
    fault = draw.choice(CRASHES)
    return _at(draw, f"{step}/{fault[:-1]}") if fault.endswith("@") else f"{step}/{fault}"


def _at(draw: Draw, step: str, *calls: str) -> str:
    """Return a step with a fault at one of the first calls of a kind."""
    call = draw.choice(calls or ("shows", "shows", "records", "commit", "unlink"))
    return f"{step}@{call}:{draw.randint(1, 3)}"


def _anywhere(draw: Draw) -> Steps:
    forgets = draw.random() < 0.5
    steps = [_anything(draw, forgets=forgets) for _ in range(4)]
    return [*_start("make", "make", "save"), *steps]


def _replace(draw: Draw) -> Steps:
    """An output is made, and replaced; a run that ends early is followed by the same command."""
    place = draw.choice("aap")
    steps = _start(f"make=1>{place}") if draw.random() < 0.8 else _start()
    if draw.random() < 0.5:
        steps.insert(0, "plain/setup")
    act = f"overwrite=2>{place}" if steps[-1].startswith("make") else f"make=2>{place}"
    steps.append(_crash(draw, act))
    if draw.random() < 0.4:
        steps.append("rotstaged")
    steps.append(
        draw.choice(["resume/calm", _at(draw, "resume/kill"), "resume/kill", "resume/power", "resume/after"])
    )
    return [*steps, draw.choice(["resume/calm", f"overwrite=1>{place}/after"])]


def _trainer(draw: Draw) -> Steps:
    """Another user writes to a place while a process replaces or removes it."""
    if draw.random() < 0.5:
        place = draw.choice("ap")
        return [*_start(f"make=1>{place}"), f"overwrite=2>{place}/hand", f"overwrite=1>{place}/hand"]
    retire = draw.choice(["now", "week"])
    return [*_start("make=1>a"), f"retire={retire}/hand", "purge/hand"]


def _writers(draw: Draw) -> Steps:
    """Several hosts convert to one destination."""
    place = draw.choice("aap")
    steps = _start(*([f"make=1>{place}"] if draw.random() < 0.5 else []))
    verb = "overwrite" if steps[-1].startswith("make") else "make"
    verbs = draw.choice([[verb], ["bare"], [verb, "bare"]])
    acts = [f"{draw.choice(verbs)}={draw.choice('12')}>{place}" for _ in range(draw.choice([2, 2, 3]))]
    steps.append("+".join(acts) + draw.choice(["/race", "/race", "/chaos"]))
    return [*steps, draw.choice([f"overwrite=1>{place}+resume/race", "resume/calm", "resume/kill"])]


def _delete(draw: Draw) -> Steps:
    """A source goes because of its copy, and the copy is to be replaced."""
    copies = draw.choice([[], [], ["make=1>b"], ["copy=a>b"]])
    retire = _crash(draw, f"retire={draw.choice(['now', 'now', 'week'])}")
    steps = [*_start("make=1>a", *copies), retire]
    acts = draw.choices(["purge", "purge", "retire=now", "restore"], k=draw.choice([1, 2]))
    return [
        *steps,
        *(_crash(draw, act) for act in acts),
        draw.choice(["overwrite=2>a/calm", "overwrite=2>a/after", "purge/calm"]),
    ]


def _counted(draw: Draw) -> Steps:
    """A copy that a deletion counts on is replaced, and what is beside it changes."""
    place = draw.choice("aap")
    more = draw.choice([["make=1>b"], ["make=1>b"], ["copy=a>b"], [f"link={place}>b"], []])
    if place == "p" and more == ["copy=a>b"]:
        more = ["make=1>b"]
    steps = _start(f"make=1>{place}", *more)
    if not draw.randrange(4):
        steps.append(f"rot={place}")
    steps.append("retire=now/setup")
    between = [[], [], ["rot=b"], ["rewrite=b"], [f"move={place}>{'q' if place == 'p' else 'c'}"], ["lose"]]
    steps += draw.choice(between)
    moved = steps[-1].partition(">")[2] if steps[-1].startswith("move") else place
    catalog = draw.choice(["overwrite", "overwrite", "overwrite", "bare"])
    act = f"{catalog}=2>{moved}"
    steps.append(draw.choice([f"{act}/calm", f"{act}/after", _crash(draw, act), _at(draw, f"{act}/kill")]))
    if "/kill" in steps[-1] or draw.random() < 0.3:
        steps.append("resume/calm")
    ends = [
        "purge/kill",
        "purge/after",
        "restore/calm",
        "restore/kill",
        "bare=2>b/calm",
        "overwrite=2>b/calm",
    ]
    return [*steps, draw.choice(ends)]


def _at_once(draw: Draw) -> Steps:
    """A copy is replaced while a deletion begins to count on it."""
    verb = draw.choice(["overwrite", "bare", "bare"])
    place = draw.choice("aap")
    retire = draw.choice(["retire=now", "retire=now", "purge"])
    steps = _start(f"make=1>{place}", *(["retire=week"] if retire == "purge" else []))
    replaces = f"{verb}=2>{place}"
    ways = [
        f"{replaces}+{retire}/{draw.choice(['race', 'race', 'chaos'])}",
        _at(draw, f"{replaces}+{retire}/pause", "shows"),
        _at(draw, f"{retire}+{replaces}/pause", "records", "commit"),
    ]
    return [
        *steps,
        draw.choice(ways),
        draw.choice(["resume/calm", "purge/calm", f"overwrite=2>{place}/calm"]),
    ]


def _mutual(draw: Draw) -> Steps:
    """Two copies of what was deleted are replaced at the same time, each because of the other."""
    steps = _start("make=1>a", "make=1>b", "retire=now")
    both = "overwrite=2>a+overwrite=2>b"
    steps.append(
        draw.choice([f"{both}/race", f"{both}/chaos", _at(draw, f"{both}/pause", "shows", "records")])
    )
    return [*steps, draw.choice(["purge/calm", "resume/calm", "purge+resume/race"])]


def _grace(draw: Draw) -> Steps:
    """What was set aside is restored, held, purged and saved again."""
    steps = _start("make=1>a", "retire=week")
    acts = ["hold=1", "restore", "resave=1", "purge", "purge", "purge+restore", "purge+purge", "retire=week"]
    for _ in range(draw.choice([2, 3])):
        if draw.random() < 0.25:
            steps += [_at(draw, "purge/kill", "unlink", "commit"), "restore/calm"]
            continue
        act = draw.choice(acts)
        if "+" in act:
            steps.append(draw.choice([f"{act}/race", _at(draw, f"{act}/pause", "unlink", "commit")]))
        else:
            steps.append(draw.choice([f"{act}/calm", _crash(draw, act), _crash(draw, act)]))
    return [*steps, draw.choice(["restore/calm", "purge/calm"])]


def _catalogs(draw: Draw) -> Steps:
    """An old catalog is restored, or one is rebuilt from what is on the disk."""
    steps = [
        *_start("make=1>a"),
        "backup/setup",
        draw.choice(["retire=now/kill", "retire=now/calm", "retire=week/kill"]),
    ]
    steps.append(draw.choice(["rewind", "lose", "lose"]))
    steps += draw.sample(["purge/calm", "retire=now/kill", "overwrite=2>a/calm", "restore/calm"], 2)
    return steps


def _thin(draw: Draw) -> Steps:
    """Steps lose something in their place; what is beside is purged, restored, held and replaced."""
    steps = _start("save", *(["make=1>a"] if draw.random() < 0.5 else []))
    if draw.random() < 0.3:
        steps.insert(0, "plain/setup")
    act = f"thin={draw.choice('112')}"
    steps.append(
        draw.choice(
            [
                f"{act}/calm",
                _crash(draw, act),
                _at(draw, f"{act}/kill"),
                _at(draw, f"{act}/power"),
                f"{act}/hand",
                f"{act}+{draw.choice(['thin=1', 'retire=now', 'make=1>b', 'purge'])}/race",
            ]
        )
    )
    acts = ["thin=1", "thin=2", "purge", "purge/kill", "restore", "hold=1", "resave=1", "retire=now", "scrub"]
    steps += (step if "/" in step else _crash(draw, step) for step in draw.choices(acts, k=3))
    return [*steps, "thin=1/calm", draw.choice(["purge/calm", "restore/calm", "retire=now/calm"])]


THEMES = {
    "anywhere": Theme(10, "any steps", _anywhere),
    "replace": Theme(18, str(_replace.__doc__), _replace),
    "trainer": Theme(8, str(_trainer.__doc__), _trainer),
    "writers": Theme(10, str(_writers.__doc__), _writers),
    "delete": Theme(12, str(_delete.__doc__), _delete),
    "counted": Theme(14, str(_counted.__doc__), _counted),
    "at-once": Theme(10, str(_at_once.__doc__), _at_once),
    "mutual": Theme(5, str(_mutual.__doc__), _mutual),
    "grace": Theme(9, str(_grace.__doc__), _grace),
    "catalogs": Theme(4, str(_catalogs.__doc__), _catalogs),
    # By its name only (`--theme thin`): the seeds of known faults are of programs of the others.
    "thin": Theme(0, str(_thin.__doc__), _thin),
}
