"""Names of source and output as Prefect assets, for Prefect's own lineage.

`prefect.asset.materialization.succeeded` names the source as upstream, and can start a deployment. Only
Prefect Cloud draws this lineage; the catalog records it in any case.
"""

from __future__ import annotations

from prefect.assets import Asset, add_asset_metadata
from prefect.types.names import MAX_ASSET_KEY_LENGTH, RESTRICTED_ASSET_CHARACTERS

from ckptcore.conversion.publish import Result
from ckptcore.redaction import bare_url
from ckptcore.store import local_path
from ckptcore.utils.merged_url import roots_of


def asset_keys(*places: str) -> list[Asset | str]:
    """Return asset keys for paths and URLs; those that Prefect cannot name are left out.

    >>> asset_keys("s3://team/run/step-7", "/models/llama", "/models/a b", "s3://team/" + 600 * "x")
    ['s3://team/run/step-7', 'file:///models/llama', 'file:///models/a_b']
    """
    keys: list[Asset | str] = []
    for place in [folder for merged in places for folder in roots_of(merged) or (merged,)]:
        path = local_path(place)
        key = f"file://{path.absolute()}" if path is not None else bare_url(place)
        for character in RESTRICTED_ASSET_CHARACTERS:
            key = key.replace(character, "_")
        if len(key) <= MAX_ASSET_KEY_LENGTH:
            keys.append(key)
    return keys


def describe_output(result: Result) -> None:
    """Say in the assets of an output what it is."""
    about = {"format": result.format, "bytes": result.nbytes, "conversion": result.conversion}
    for key in asset_keys(result.destination):
        add_asset_metadata(key, about)
