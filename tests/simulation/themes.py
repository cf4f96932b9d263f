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
    "gc": 1,
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


def _fault(draw: Draw, kind: str, *calls: str, most: int = 3, process: int = 0) -> str:
    """Return a fault at, or a few calls behind, one of the first calls of a kind."""
    turns = f"~{draw.choice([5, 10, 20, 30, 40, 60, 80, 120, 200])}" if kind == "pause" else ""
    behind = draw.choice(["", "", "", "+1", "+2", "+3"])
    return f"{kind}{turns}@{draw.choice(calls)}:{draw.randint(1, most)}{behind}" + (
        f"*{process}" if process else ""
    )


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


def _collected(draw: Draw) -> Steps:
    """`gc` runs beside thins, restores and conversions, and behind those that were killed."""
    made = draw.random() < 0.6
    steps = _start("save", *(["make=1>a"] if made else []))
    if draw.random() < 0.3:
        steps.insert(0, "plain/setup")
    thin, convert = f"thin={draw.choice('112')}", f"{'overwrite' if made else 'make'}={draw.choice('12')}>a"
    if draw.random() < 0.3:
        steps.append("retire=week/calm")
    first = draw.choice([thin, thin, convert])
    ways = [f"{first}/kill", _at(draw, f"{first}/kill", "shows", "shows", "records")]
    ways.append(f"{thin}+{convert}/{draw.choice(['race', 'race', 'chaos'])}")
    steps.append(draw.choice(ways))
    beside = ["gc", *draw.sample([thin, convert, "restore"], draw.choice([1, 2]))]
    draw.shuffle(beside)
    pauses = [_fault(draw, "pause", "shows", "records"), _fault(draw, "pause", "shows", process=1)]
    steps.append(f"{'+'.join(beside)}/{draw.choice(['race', 'race', 'chaos', 'store', 'slow', *pauses])}")
    return [*steps, draw.choice(["gc/calm", "resume/calm"]), draw.choice([f"{thin}/calm", "gc/calm"])]


def _repeated(draw: Draw) -> Steps:
    """A run ends in the midst of a publication, and so does the one that resumes it."""
    place = draw.choice("aap")
    steps = _start(f"make=1>{place}", *(["make=1>b", "retire=now"] if draw.random() < 0.4 else []))
    plain = draw.random() < 0.6
    if plain:
        steps.insert(0, "plain/setup")
    act = f"overwrite=2>{place}"
    if draw.random() < 0.35:  # before it is recorded, so that all is staged
        steps += [f"{act}/kill@records:{draw.randint(5, 9)}", "rotstaged"]
        return [*steps, "resume/calm", draw.choice(["resume/calm", "scrub"])]
    # Between the two steps of a replacement, where there are two; else right behind the one.
    middle = "kill@shows:2" if plain else "kill@shows:1+1"
    first = _fault(draw, draw.choice(["kill", "kill", "power"]), "shows", most=2)
    steps.append(f"{act}/" + (middle if draw.random() < 0.5 else first))
    ends = [
        _fault(draw, "kill", "shows", "rename", "write", "renameat2", most=2),
        _fault(draw, "kill", "write", "unlink"),
        "power",
        "kill",
    ]
    return [*steps, f"resume/{draw.choice(ends)}", "resume/calm"]


def _once(draw: Draw) -> Steps:
    """Several hosts are asked to make one output, and a claim decides who does it."""
    place = draw.choice("aap")
    verbs = [f"once={draw.choice('112')}>{place}" for _ in range(draw.choice([2, 2, 3]))]
    pauses = _fault(draw, "pause", "commit", "flock", "records", "mkdir")
    if draw.random() < 0.6:  # for longer than a claim lasts, while another one is at work
        where = draw.choice(["commit:1", "commit:1+1", "commit:1+2", "mkdir:1", "flock:1"])
        pauses = f"stop~{draw.choice([15, 25, 35, 50, 70])}@{where}"
    faults = [pauses, pauses, f"{pauses}&{_fault(draw, 'pause', 'commit', 'records', process=1)}"]
    faults += ["race", "chaos", "database"]
    steps = [*_start(), f"{'+'.join(verbs)}/{draw.choice(faults)}"]
    more = [f"once=1>{place}/calm", f"once=1>{place}+resume/race", f"overwrite=2>{place}/calm"]
    return [*steps, draw.choice(more), f"once=1>{place}/calm"]


def _lease(draw: Draw) -> str:
    """Return faults by which one process asks for a lease of another one that was delayed."""
    kind = draw.choice(["delay", "delay", "stop"])
    call = draw.choice(["PutObject:5", "PutObject:9", "PutObject:12", "shows:1", "shows:2"])
    delay = f"{kind}~{draw.choice([40, 60, 80])}@{call}"
    drifts = [f"drift@ListObjectsV2:1{process}" for process in ("", "*1")]
    return "&".join([delay, f"pause~{draw.choice([40, 60, 80])}@GetObject:1*1", *drifts])


def _store(draw: Draw) -> Steps:
    """Replies of an object store are lost or slow, it is asked too often, its conditions have no effect."""
    steps = _start(*(["make=1>a"] if draw.random() < 0.5 else []))
    for habit in draw.choices(["loose", "lagging", ""], [2, 1, 7]):
        steps[:0] = [f"{habit}/setup"] if habit else []
    verb = "overwrite" if "make=1>a/setup" in steps else "make"
    one, other = (f"{draw.choice([verb, verb, 'bare'])}={draw.choice('12')}>a" for _ in range(2))
    ways = [
        f"{one}+{other}/slow",
        f"{one}+{other}/slow",
        f"{one}+{other}/store",
        f"{one}/store",
        f"{one}/"
        + _fault(draw, "kill", "PutObject", "CompleteMultipartUpload", "CreateMultipartUpload", most=5),
        f"{one}+{other}/" + _fault(draw, "pause", "shows", "CreateMultipartUpload", "records"),
        f"{one}/" + _fault(draw, "kill", "shows"),
        f"{one}+{other}/{_lease(draw)}",
    ]
    steps += draw.sample(ways, 2)
    return [
        *steps,
        draw.choice(["gc", "resume/calm", "retire=now/store"]),
        draw.choice(["resume/calm", "gc/calm"]),
    ]


def _locks(draw: Draw) -> Steps:
    """Several processes want the lock of one staging folder, and one ends or pauses where it has it."""
    if draw.random() < 0.6:
        steps = _start(*(["make=1>a"] if draw.random() < 0.3 else []))
        verbs = draw.choice(
            [["bare=1>a", "bare=2>a"], ["bare=1>a", "overwrite=2>a"], ["overwrite=1>a", "bare=2>a"]]
        )
        pause = _fault(draw, "pause", "shows", "shows", "records", most=1)
        return [*steps, f"{'+'.join(verbs)}/{pause}", "resume/calm"]
    # One is killed while it removes the folder, another one has opened the lock in it.
    steps = _start("make=1>a", "make=1>b", *(["retire=now"] if draw.random() < 0.5 else []))
    other = draw.choice(["bare=2>a", "overwrite=2>a"])
    third = draw.choice(["retire=now", "retire=now", "overwrite=2>b"])
    wait = f"pause~{draw.choice([80, 120, 200, 300])}@flock:1*1"
    kill = f"kill@rmdir:{draw.randint(1, 4)}"
    return [
        *steps,
        f"overwrite=1>a+{other}+{third}/{kill}&{wait}",
        draw.choice(["resume/calm", "purge/calm"]),
    ]


def _waiting(draw: Draw) -> Steps:
    """What is set aside waits for its end, and the copy that is left changes meanwhile."""
    if draw.random() < 0.5:
        place = draw.choice("aap")
        steps = _start(f"make=1>{place}", "retire=week")
        changes = [f"rot={place}", f"rot={place}", f"rewrite={place}", f"bare=2>{place}/calm"]
    else:
        steps = [*_start("make=1>a", "make=1>b", "retire=now"), "overwrite=2>a/setup"]
        changes = ["rot=b", "rewrite=b", "scrub", "bare=2>b/calm"]
    ends = ["purge/calm", "purge/calm", "purge/kill", "purge/after", "retire=now/calm"]
    return [*steps, draw.choice(changes), draw.choice(ends), draw.choice(["restore/calm", "purge/calm"])]


def _looks(draw: Draw) -> Steps:
    """What was looked at changes before it is counted on."""
    verb = draw.choice(["bare", "bare", "overwrite"])
    if draw.random() < 0.5:
        place, retire = draw.choice("aap"), draw.choice(["retire=now", "retire=now", "purge"])
        steps = _start(f"make=1>{place}", *(["retire=week"] if retire == "purge" else []))
        pause = _fault(draw, "pause", "commit", "commit", "mkdir", "records", most=4)
        steps.append(f"{retire}+{verb}=2>{place}/{pause}")
    else:
        # A deletion counts on the newest.
        steps = _start(*draw.sample(["make=1>a", "make=1>b"], 2), "retire=now")
        # From its last look at the other copy until that copy has the record.
        call, first, last = draw.choice(
            [("unlink", 1, 2), ("mkdir", 5, 6), ("records", 7, 9), ("commit", 2, 3)]
        )
        pause = f"pause~{draw.choice([60, 100, 150, 200])}@{call}:{draw.randint(first, last)}"
        steps.append(f"overwrite=2>a+{verb}=2>b/{pause}")
    return [*steps, draw.choice(["purge/calm", "resume/calm"])]


def _deciding(draw: Draw) -> Steps:
    """A removal is decided, or ends, while another process decides about the same."""
    steps = _start("make=1>a")
    if draw.random() < 0.25:
        steps.append(f"retire=week/kill@commit:{draw.randint(1, 4)}")
        return [*steps, "purge/calm", draw.choice(["restore/calm", "purge/calm", "retire=now/calm"])]
    if draw.random() < 0.45:
        steps.append(f"retire=now/power@unlink:{draw.randint(2, 4)}")
        return [*steps, draw.choice(["purge/calm", "restore/calm", "retire=now/calm"]), "purge/calm"]
    steps.append("retire=week/setup")
    both = draw.choice(["purge+restore", "purge+restore", "restore+purge", "purge+purge"])
    calls = (
        ("unlink", "unlink", "commit", "rmdir", "records")
        if both.startswith("purge")
        else ("renameat2", "commit")
    )
    steps.append(f"{both}/{_fault(draw, 'pause', *calls)}")
    return [*steps, draw.choice(["restore/calm", "purge/calm", "purge/database"])]


# Which theme a seed is of depends on the sum of those before: seeds of known faults are of programs of these.
THEMES = {
    "anywhere": Theme(3, "any steps", _anywhere),
    "gc": Theme(3, str(_collected.__doc__), _collected),
    "thin": Theme(4, str(_thin.__doc__), _thin),
    "again": Theme(3, str(_repeated.__doc__), _repeated),
    "replace": Theme(15, str(_replace.__doc__), _replace),
    "once": Theme(3, str(_once.__doc__), _once),
    "trainer": Theme(5, str(_trainer.__doc__), _trainer),
    "store": Theme(4, str(_store.__doc__), _store),
    "writers": Theme(3, str(_writers.__doc__), _writers),
    "locks": Theme(3, str(_locks.__doc__), _locks),
    "delete": Theme(12, str(_delete.__doc__), _delete),
    "counted": Theme(12, str(_counted.__doc__), _counted),
    "waiting": Theme(4, str(_waiting.__doc__), _waiting),
    "at-once": Theme(5, str(_at_once.__doc__), _at_once),
    "looks": Theme(3, str(_looks.__doc__), _looks),
    "mutual": Theme(5, str(_mutual.__doc__), _mutual),
    "grace": Theme(5, str(_grace.__doc__), _grace),
    "deciding": Theme(4, str(_deciding.__doc__), _deciding),
    "catalogs": Theme(4, str(_catalogs.__doc__), _catalogs),
}
