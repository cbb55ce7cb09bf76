"""Labelled examples of the data sets that Hugging Face's `datasets` reads: by a name of the hub, or from a folder.

A source is written `hf:name`, `hf:name,config` or `hf:folder`.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from common.errors import RunError, UserError
from common.files import reading

if TYPE_CHECKING:
    import datasets  # slow to import, and needed for hf: alone

SPLITS = {"train": ("train",), "dev": ("validation", "dev", "valid"), "test": ("test",)}
MOST_OF_AN_ERROR = 400  # characters of what `datasets` says


def is_hub(source: str) -> bool:
    """True for a source that `datasets` reads, and not a file."""
    return source.startswith("hf:")


def has_split(source: str, role: str) -> bool:
    """True if the data set has a split for this role."""
    return _split_of(_open(source), role) is not None


def has_labels(source: str, role: str, columns: Sequence[str]) -> bool:
    """True if the split for this role has a label in the first of `columns` that it has.

    The test sets of competitions have no labels.
    """
    splits = _open(source)
    rows = splits[_split_of(splits, role)]
    column = next((name for name in columns if name in rows.features), None)
    if column is None:
        return False
    names = _class_names(rows.features[column])
    values = (_named(value, names) for value in rows[column])
    labels = (label for value in values for label in (value if isinstance(value, list) else [value]))
    return any(label not in (None, "", -1) for label in labels)


def read_records(source: str, role: str) -> Iterator[tuple[str, dict]]:
    """(place, record) of each row of the split for this role, with class names for class numbers.

    Raises UserError where there is no such split, RunError where the hub does not answer.
    """
    splits = _open(source)
    split = _split_of(splits, role)
    if split is None:
        raise UserError(f"{source} has {', '.join(splits)}, but no {role} split: name a file with --{role}")
    names = {column: _class_names(feature) for column, feature in splits[split].features.items()}
    _require_names_of_files(source, split, names)
    for number, row in enumerate(splits[split]):
        yield f"{source}, {split} row {number}", {name: _named(value, names[name]) for name, value in row.items()}


def _require_names_of_files(source: str, split: str, names: Mapping[str, list[str] | None]) -> None:
    """Raise UserError where a Parquet file of a split has other names for its class numbers than those that `datasets`
    takes for all splits: those of the first one."""
    import datasets
    from pyarrow import parquet

    name, config = _name_and_config(source)
    if not Path(name).is_dir():
        return
    files = datasets.load_dataset_builder(name, config).config.data_files or {}
    for file in [Path(file) for file in files.get(split, ()) if str(file).endswith(".parquet")]:
        for column, feature in datasets.Features.from_arrow_schema(parquet.read_schema(file)).items():
            own = _class_names(feature)
            if own and names.get(column) not in (None, own):
                raise UserError(
                    f"{file}: its column {column} has the classes {', '.join(own)}, but {split} is read with "
                    f"{', '.join(names[column] or ())}: give all files the same classes in the same order"
                )


def _name_and_config(source: str) -> tuple[str, str | None]:
    name, _, config = source.removeprefix("hf:").partition(",")
    return name, config or None


def _require_files(folder: Path) -> None:
    """Raise UserError for a file of the folder that cannot be read, or stands for another one."""
    for file in sorted(folder.glob("[!.]*")) if folder.is_dir() else ():
        with reading(file, str(file), may_be_packed=True):
            pass


def _open(source: str) -> "datasets.DatasetDict":
    """All splits of a source."""
    import datasets
    from datasets.exceptions import DatasetsError

    name, config = _name_and_config(source)
    try:
        return datasets.load_dataset(name, config)
    except OSError as error:
        _require_files(Path(name))
        if Path(name).is_dir():
            fix = "put files such as train.csv or train.jsonl into that folder"
            raise UserError(f"{source} cannot be read: {_first_line(error)}: {fix}") from None
        raise RunError(f"{source} is not on this machine and the hub does not answer: {_first_line(error)}") from None
    except DatasetsError as error:  # its later lines, or its cause, say what was wrong
        _require_files(Path(name))
        text = str(error) if "\n" in str(error) or not error.__cause__ else f"{error}: {error.__cause__}"
        raise UserError(f"{source} cannot be read: {shorten(text, MOST_OF_AN_ERROR)}") from None
    except Exception as error:  # such as an unknown config; the hub and its client raise many kinds
        _require_files(Path(name))
        raise UserError(f"{source} cannot be read: {_first_line(error)}") from None


def _split_of(splits: "datasets.DatasetDict", role: str) -> str | None:
    return next((split for split in SPLITS[role] if split in splits), None)


def _class_names(feature: object) -> list[str] | None:
    """The names of a ClassLabel, or of the ClassLabels in a list; None for any other feature."""
    return getattr(getattr(feature, "feature", feature), "names", None)


def _named(value: Any, names: list[str] | None) -> Any:
    if names is None:
        return value
    if isinstance(value, list):
        return [_named(one, names) for one in value]
    return names[value] if value is not None and value >= 0 else None  # GLUE's test sets have -1 for "no label"


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
