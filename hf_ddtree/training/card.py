"""The model card of a trained drafter."""

import argparse
import shlex
from pathlib import Path

from ..models.dflash import DFlashDraftModel
from .log import read_log

CARD = """---
library_name: transformers
license: other
{base_model}tags:
  - dflash
  - speculative-decoding
  - hf_ddtree
---

# DFlash drafter for {base}

A block-diffusion drafter for lossless tree decoding with `hf_ddtree`: {layers} layers, {millions:.1f}M parameters,
block size {block} (drafts up to {depth} tokens a round), {transition}. It borrows the target's embedding and head, and
it can change the speed of decoding only, never the text.

```python
from hf_ddtree import DDTreeConfig, DFlashDraftModel

drafter = DFlashDraftModel.from_pretrained("{folder}", dtype=target.dtype)  # this folder, wherever it is
config = DDTreeConfig.from_pretrained("{folder}", max_new_tokens=128)
target.generate(**inputs, assistant_model=drafter, generation_config=config)
```

It was trained for this target only, on text like the training data; on other text it drafts worse, which costs speed.
Choose a license that fits the target's and the data's.

## Tokens per round

On held-out text{caveat}, by replaying the rounds over it, after training and calibration:

{figures}

first: how often the drafter's first token is the target's; chain: its best token at each depth; tree-N: N nodes;
marginal: depths taken for independent. Calibrated temperatures of the depths: {temperatures}.

## Training

    {command}

{log}
"""


def write_card(out: Path, drafter: DFlashDraftModel, figures: dict[str, float], options: argparse.Namespace) -> None:
    """Writes README.md, unless there is one that this did not write: a card that somebody wrote stays."""
    path = out / "README.md"
    config = drafter.config
    base = "HuggingFaceTB/SmolLM2-135M-Instruct" if options.model == "smollm2" else options.model
    local = Path(base).exists()
    rank = config.transition_rank
    text = CARD.format(
        base=Path(base).resolve().name if local else base,
        base_model="" if local else f"base_model: {base}\n",
        folder=out.resolve().name,
        layers=config.num_hidden_layers,
        millions=sum(p.numel() for p in drafter.parameters()) / 1e6,
        block=config.block_size,
        depth=config.block_size - 1,
        transition=f"with a path-conditional transition of rank {rank}" if rank else "without a transition",
        caveat="" if options.data is None or options.answer_with_target else " of the data",
        figures=_table(["", "value"], [[name, f"{value:.3f}"] for name, value in figures.items()]),
        temperatures=", ".join(map(str, config.depth_temperatures or ["none, for want of the target's greedy text"])),
        command=shlex.join(["hf-ddtree", *options.arguments]),
        log=_log_table(out / "training" / "log.jsonl"),
    )
    if path.exists() and MARK.strip().encode() not in path.read_bytes():
        path = out / "README.generated.md"
    path.write_text(text + MARK, encoding="utf-8")


MARK = "\n<!-- written by hf-ddtree train -->\n"


def _log_table(log: Path) -> str:
    records = read_log(log)
    if not records:
        return ""
    names = [name for name in records[-1] if not name.endswith("-marginal")]
    return _table(names, [[str(record.get(name, "")) for name in names] for record in records])


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
