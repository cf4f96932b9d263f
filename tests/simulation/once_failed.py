"""Programs in which the product once failed, step by step: they stay what they are when the themes change."""

ONCE_FAILED: dict[str, list[tuple[str, int]]] = {
    "a copy that was renamed by hand is overwritten without a catalog": [
        ("save/setup", 306142937721),
        ("save/setup", 832339061544),
        ("validate=2/setup", 508604845296),
        ("make=1>a/setup", 85252069286),
        ("retire=now/setup", 1068005083216),
        ("move=a>c", 854567950110),
        ("overwrite=2>c/after", 897224772942),
        ("resume/calm", 668932676754),
        ("together", 1052511393350),
    ],
    "a conversion that is recorded fails because its staging folder cannot be removed": [
        ("save/setup", 638087195500),
        ("save/setup", 794754587931),
        ("validate=2/setup", 599277294729),
        ("make=1>p/setup", 823000165195),
        ("overwrite=2>p/error@rename:1", 972894312592),
    ],
    "who replaces a place with some of the contents drops the record beside the only copy": [
        ("save/setup", 312808686885),
        ("save/setup", 797469442162),
        ("validate=2/setup", 801349098994),
        ("make=1>a/setup", 638711701010),
        ("make=1>b/setup", 475168794887),
        ("rot=a", 437732158886),
        ("retire=now/setup", 544905379543),
        ("overwrite", 964157453915),
        ("lose", 993867816529),
        ("overwrite=2>a/calm", 624633504633),
    ],
    "the old output is removed before the new one is durable at the destination": [
        ("save/setup", 14909110498),
        ("save/setup", 752417809016),
        ("validate=2/setup", 402643280761),
        ("make=1>a/setup", 638711701010),
        ("overwrite=2>a/power@rmdir:1", 3),
    ],
    "the record of an obligation is beside links, and not beside the bytes to which they lead": [
        ("save/setup", 1031726481164),
        ("save/setup", 684049883325),
        ("validate=2/setup", 602107847902),
        ("make=1>a/setup", 39271656180),
        ("link=a>b/setup", 836439103789),
        ("retire=now/setup", 142075686013),
        ("bare=2>a/calm", 642740937731),
    ],
    "two copies are replaced at the same time, each because of the other, and one process is stopped": [
        ("save/setup", 1012590350587),
        ("save/setup", 533585420726),
        ("validate=2/setup", 107681860633),
        ("make=1>a/setup", 224451696746),
        ("make=1>b/setup", 641035633568),
        ("retire=now/setup", 81262173491),
        ("overwrite=2>a+overwrite=2>b/pause@shows:1", 817049214205),
    ],
    # In these, what must be true was wrong: a source that is restored under another name is not deleted.
    "a source is restored under another name after a kill of its purge, and retired again": [
        ("save/setup", 61619520485),
        ("save/setup", 152098630426),
        ("validate=2/setup", 144866200589),
        ("make=1>a/setup", 489470103606),
        ("retire=week/setup", 285232913508),
        ("purge/kill@commit:1", 764952542647),
        ("restore/calm", 133270975034),
        ("retire=week/kill@unlink:2", 692665741712),
    ],
    "a source is restored under another name, and retired again with a kill": [
        ("save/setup", 510345732508),
        ("save/setup", 208913921978),
        ("validate=2/setup", 580752848084),
        ("make=1>a/setup", 809873142886),
        ("retire=now/kill", 657000617525),
        ("restore/kill", 1056929526043),
        ("retire=now/kill", 337521818266),
    ],
    "a source is restored under another name, and retired again with a power cut": [
        ("save/setup", 991030439141),
        ("save/setup", 250184004860),
        ("validate=2/setup", 397628302867),
        ("make=1>a/setup", 751004028447),
        ("retire=week/setup", 344079189504),
        ("restore/calm", 1044694571026),
        ("restore/kill@records:1", 283790365655),
        ("retire=week/power", 1081564791321),
    ],
    # The time of change that a power cut undoes is undone behind a second cut, too.
    "a replaced output is restored by a run behind two power cuts": [
        ("save/setup", 386596341758),
        ("save/setup", 750938958957),
        ("validate=2/setup", 1063543365448),
        ("make=1>a/setup", 1029464455995),
        ("overwrite=2>a/power@unlink:2", 145317210146),
        ("scrub", 157873573082),
    ],
    # Who writes to an output that was published a moment ago writes to the new one, equal or not.
    "another user writes to a new output that equals the old one": [
        ("save/setup", 396366810932),
        ("save/setup", 190931351393),
        ("validate=2/setup", 169729720026),
        ("make=1>p/setup", 910125338346),
        ("together", 1097101537630),
        ("overwrite=2>p/hand", 585398104805),
    ],
    # Neither copy is intact: the one that we cannot open is the only one whose tensor torch still reads.
    "a copy that does not open is overwritten when the copy that is counted on has rotted": [
        ("save/setup", 1079311138654),
        ("save/setup", 130738157794),
        ("validate=2/setup", 15800981116),
        ("make=1>p/setup", 847584120096),
        ("make=1>b/setup", 706213064449),
        ("rot=p", 585988389892),
        ("retire=now/setup", 672019355243),
        ("rot=b", 970408610412),
        ("overwrite=2>p/kill@unlink:2", 193991647758),
    ],
    # What an earlier conversion kept beside the destination is no output of the next one.
    "what could not be removed is kept beside a destination, which is replaced again": [
        ("save/setup", 205019019101),
        ("save/setup", 25205024135),
        ("validate=2/setup", 408220192635),
        ("make=1>a/setup", 211351033368),
        ("overwrite=2>a/error", 640825984951),
        ("overwrite=1>a/after", 576443298144),
    ],
    # A step that is retired is gone from its place, whether or not another process was to thin it.
    "a step is retired while another process finds that it has nothing to lose": [
        ("save/setup", 610809686736),
        ("save/setup", 416706618368),
        ("validate=2/setup", 474041858875),
        ("make=1>a/setup", 984528556612),
        ("thin=1+retire=now/race", 429896626333),
    ],
    # The trainer has saved the step anew: the export alone holds what the old copy held, and must say so.
    "what a step was thinned of is purged in favour of an export": [
        ("plain/setup", 225018318602),
        ("save/setup", 257025130736),
        ("save/setup", 1032526231598),
        ("validate=2/setup", 377132327327),
        ("make=1>a/setup", 593872915667),
        ("thin=1/power@commit:3", 704713893248),
        ("resave=1/kill@records:1", 556164512674),
        ("purge/calm", 74582371899),
    ],
    # The folder into which a thin was about to move the old step was empty, and unknown to the catalog.
    "a step is thinned once more behind a power cut, which undid the row of what is to be set aside": [
        ("save/setup", 696330861054),
        ("save/setup", 773050845819),
        ("validate=2/setup", 101993328907),
        ("save/setup", 294360154451),
        ("make=1>a/setup", 373617221296),
        ("thin=1/power", 228030318771),
        ("hold=1/kill", 355642382345),
        ("retire=now/kill", 146205306377),
        ("thin=1/calm", 302265759792),
    ],
}

ONCE_FAILED_IN_A_BUCKET: dict[str, list[tuple[str, int]]] = {
    # What must be true was wrong: half replaced, a step is complete with what is staged beside it.
    "a step is half thinned, object by object": [
        ("save/setup", 1020591858894),
        ("save/setup", 363155946072),
        ("save/setup", 486677313234),
        ("thin=2/kill@shows:3", 950702814644),
    ]
}
