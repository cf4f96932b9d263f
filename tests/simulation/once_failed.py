"""Programs in which the product once failed, step by step: they stay what they are when the themes change."""

ONCE_FAILED: dict[str, list[tuple[str, int]]] = {
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
}
