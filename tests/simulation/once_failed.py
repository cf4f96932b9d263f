"""Programs in which the product once failed, step by step: they stay what they are when the themes change."""

ONCE_FAILED: dict[str, list[tuple[str, int]]] = {
    "a conversion that is recorded fails because its staging folder cannot be removed": [
        ("save/setup", 638087195500),
        ("save/setup", 794754587931),
        ("validate=2/setup", 599277294729),
        ("make=1>p/setup", 823000165195),
        ("overwrite=2>p/error@rename:1", 972894312592),
    ]
}
