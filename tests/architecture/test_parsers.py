"""Text of others is parsed in one module, with one exception; the table names the modules of our own text."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("ckptcore", "tasks", "flows", "deployments", "alembic")
# Functions of libraries that raise more than one exception, and whose bounds are not ours.
PARSERS = {
    *(
        "json.loads",
        "json.load",
        "tomllib.loads",
        "tomllib.load",
        "yaml.load",
        "yaml.safe_load",
        "yaml.parse",
    ),
    *("datetime.fromisoformat", "date.fromisoformat", "time.fromisoformat", "datetime.strptime"),
    *("parsedate_to_datetime", "urlsplit", "urlparse"),
}
_ROWS = "rows of the catalog, which this project writes"
_PROCESS = "the answer of a process of this project"
_PACKAGE = "a file of this package"
# Module -> why it parses by itself.
OWN = {
    "ckptcore/utils/foreign_text.py": "the module of these functions",
    "ckptcore/utils/plain_yaml.py": "the same for YAML",
    **{f"ckptcore/catalog/{name}.py": _ROWS for name in ("conversions", "row_values")},
    "ckptcore/catalog/sql_query.py": _PROCESS,
    "ckptcore/catalog/sqlworker.py": _PROCESS,
    "ckptcore/planning/config_agreement.py": "JSON that transformers wrote a line before",
    "ckptcore/planning/transformers_process.py": _PROCESS,
    "ckptcore/utils/patterns.py": _PROCESS,
    "ckptcore/planning/kept_answers.py": "a file of this project, compared with its digest",
    "ckptcore/core/columnar_file.py": "inside `parsing`",
    "ckptcore/core/named_values.py": "inside `parsing`, or of the reader of pickles",
    "ckptcore/encodings/pickle/writer.py": "values that `named_values` has checked",
    "ckptcore/loading/plain_values.py": "values that `named_values` has checked",
    "ckptcore/naming/maps/declaration.py": _PACKAGE,
    "ckptcore/naming/maps/hub_config.py": _PACKAGE,
    "ckptcore/store/objects/session.py": "a file of botocore",
    "deployments/deploy.py": _PACKAGE,
    "deployments/parameters.py": _PACKAGE,
    "deployments/local/system.py": "a file of `make up`",
    "ckptcore/page/access.py": "a header that is only compared",
    "deployments/senders/send.py": "a program of its own, without this package",
}


def used(path: Path) -> Iterator[str]:
    """Yield the names that a module uses, called or not, if one may be a parser's."""
    text = path.read_text()
    if not any(name.rpartition(".")[2] in text for name in PARSERS):  # a parse is slow
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute):
            value = node.value
            owner = value.attr if isinstance(value, ast.Attribute) else getattr(value, "id", "")
            yield f"{owner}.{node.attr}"
            if owner == "cls":  # of a table of classes of times
                yield f"datetime.{node.attr}"
        elif isinstance(node, ast.Name):
            yield node.id


def test_text_of_others_is_parsed_in_one_module() -> None:
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    parsing = {str(path.relative_to(ROOT)) for path in paths if PARSERS & set(used(path))}
    assert "ckptcore/utils/foreign_text.py" in parsing
    assert sorted(parsing - OWN.keys()) == []
    assert sorted(OWN.keys() - parsing) == []  # no longer: remove its line
