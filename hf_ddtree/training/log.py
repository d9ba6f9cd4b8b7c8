"""log.jsonl: a record of each evaluation on held-out text."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers.utils.logging import get_logger

logger = get_logger(__name__)


def read_log(path: Path) -> list[dict[str, Any]]:
    """The records, none where there is no file; lines that a kill tore are passed over."""
    records = []
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    for line in lines:
        with suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                records.append(record)
    return records


def append_log(path: Path, record: dict[str, Any]) -> None:
    """Adds a record; a full disk costs the record, with a warning, and not the run."""
    _write(path, [*read_log(path), record])


def cut_log(path: Path, step: int) -> None:
    """Keeps the records up to `step`, from which a run goes on."""
    _write(path, [record for record in read_log(path) if record["step"] <= step])


def _write(path: Path, records: list[dict[str, Any]]) -> None:
    partial = path.with_suffix(".log.partial")
    try:
        partial.write_text("".join(json.dumps(record) + "\n" for record in records))
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        logger.warning(f"{path} could not be written ({error}); training goes on without that record.")
