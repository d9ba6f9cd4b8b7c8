"""Token sequences to train a drafter on, and the target's hidden states over them."""

import gzip
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils.logging import tqdm

HELD_EVERY = 20  # rows 0, 20, 40, ... of the data (5%) are for evaluation and never trained on
HELD_OUT = f"every {HELD_EVERY}th from the first"
FOREIGN = math.nan  # the temperature of an answer that the target did not write


@dataclass(frozen=True)
class TokenSequence:
    """A prompt with an answer.

    Attributes:
        tokens: [length] int64, prompt then answer.
        prompt_length: tokens of the prompt.
        temperature: what the target sampled the answer at; None = greedily; `FOREIGN` = somebody else wrote it.
        number: of its row in the data, from 0, rows that give no sequence counted too.
    """

    tokens: torch.Tensor
    prompt_length: int
    temperature: float | None
    number: int = 0

    @property
    def answer_length(self) -> int:
        """Tokens of the answer."""
        return len(self.tokens) - self.prompt_length

    @property
    def greedy(self) -> bool:
        """Whether the answer is the target's own greedy one, which is what held-out acceptance is measured on."""
        return self.temperature is None


@dataclass(frozen=True)
class TargetFeatures:
    """One sequence as the trainer needs it.

    Attributes:
        sequence: the tokens.
        context: [length, taps * hidden] the tapped hidden states, as the drafter reads them.
        final: [length, hidden] the hidden state that the target's head turns into the next token's distribution.
    """

    sequence: TokenSequence
    context: torch.Tensor
    final: torch.Tensor


def read_lines(path: Path) -> Iterator[TokenSequence]:
    """Reads JSON lines `{"p": prompt ids, "g": answer ids, "t": temperature, null or 0 = greedy}`, gzip by suffix.

    Raises:
        ValueError: a line lacks a field or is torn.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    done = 0
    try:
        with opener(path, "rt") as lines:
            for line in lines:
                yield _sequence(json.loads(line), done)
                done += 1
    except (EOFError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}, line {done + 1}: expected fields p, g and t, got {error!r}; mend or remove that line."
        ) from error


def _sequence(row: dict[str, Any], number: int) -> TokenSequence:
    ids = torch.tensor([*row["p"], *row["g"]])
    if ids.dtype != torch.int64 or not row["p"] or not row["g"]:
        raise ValueError("p and g must hold token ids, one each at least")
    temperature = float(row["t"] or 0)
    return TokenSequence(ids, len(row["p"]), temperature or None, number)


def read_sequences(path: Path) -> tuple[list[TokenSequence], list[TokenSequence]]:
    """`read_lines` as (train, held).

    Raises:
        ValueError: the file holds fewer than two sequences, or a line lacks a field.
    """
    sequences = list(read_lines(path))
    if len(sequences) < 2:
        raise ValueError(f"{path} holds {len(sequences)} sequences; give at least 2.")
    return split_held(sequences)


def split_held(sequences: list[TokenSequence]) -> tuple[list[TokenSequence], list[TokenSequence]]:
    """(train, held): every `HELD_EVERY`th row of the data, the first included, is held out."""
    train = [sequence for sequence in sequences if sequence.number % HELD_EVERY]
    return train, [sequence for sequence in sequences if sequence.number % HELD_EVERY == 0]


def compute_features(
    target: PreTrainedModel, sequences: Iterable[TokenSequence], target_layer_ids: list[int], batch_size: int = 16
) -> list[TargetFeatures]:
    """Runs the target once over each sequence and keeps what training needs, in the target's dtype, on the CPU.

    Memory: (taps + 1) * hidden values per token; 4.5 GB for SmolLM2's 0.8M tokens with 4 taps in bfloat16.
    """
    ordered = sorted(sequences, key=lambda sequence: len(sequence.tokens))  # equal lengths together: little padding
    features = []
    for start in tqdm(range(0, len(ordered), batch_size), desc="target features"):
        for item in batch_features(target, ordered[start : start + batch_size], target_layer_ids):
            context, final = (states.to("cpu", copy=True) for states in (item.context, item.final))
            features.append(TargetFeatures(item.sequence, context, final))
    return features


@torch.no_grad()
def batch_features(
    target: PreTrainedModel, batch: list[TokenSequence], target_layer_ids: list[int]
) -> list[TargetFeatures]:
    """One target forward over all of `batch`; views of the padded result, on the target's device."""
    ids = torch.nn.utils.rnn.pad_sequence([sequence.tokens for sequence in batch], batch_first=True)
    # Right padding: causal attention keeps it out of the real tokens' states.
    outputs = target.base_model(ids.to(target.device), output_hidden_states=True, use_cache=False)
    final = outputs.last_hidden_state.to(target.device)
    context = torch.cat([outputs.hidden_states[i + 1].to(target.device) for i in target_layer_ids], dim=-1)
    lengths = [len(sequence.tokens) for sequence in batch]
    return [
        TargetFeatures(sequence, context[row, :length], final[row, :length])
        for row, (sequence, length) in enumerate(zip(batch, lengths, strict=True))
    ]
