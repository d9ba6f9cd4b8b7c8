"""Token sequences to train a drafter on, and the target's hidden states over them."""

import gzip
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.utils.logging import tqdm

HELD_EVERY = 20  # lines 0, 20, 40, ... (5%) are for evaluation and never trained on


@dataclass(frozen=True)
class TokenSequence:
    """A prompt with the target's own answer.

    Attributes:
        tokens: [length] int64, prompt then answer.
        prompt_length: tokens of the prompt.
        temperature: what the answer was sampled at; None = greedy.
    """

    tokens: torch.Tensor
    prompt_length: int
    temperature: float | None

    @property
    def answer_length(self) -> int:
        """Tokens of the answer."""
        return len(self.tokens) - self.prompt_length


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


def read_sequences(path: Path) -> tuple[list[TokenSequence], list[TokenSequence]]:
    """Reads JSON lines `{"p": prompt ids, "g": answer ids, "t": temperature}` (gzip by suffix) as (train, held).

    Raises:
        ValueError: the file holds no sequence, or a line lacks a field.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    train: list[TokenSequence] = []
    held: list[TokenSequence] = []
    with opener(path, "rt") as lines:
        for number, line in enumerate(lines):
            try:
                row = json.loads(line)
                ids = torch.tensor([*row["p"], *row["g"]])
                sequence = TokenSequence(ids, len(row["p"]), row["t"])
                if ids.dtype != torch.int64 or not row["p"] or not row["g"]:
                    raise ValueError("p and g must hold token ids, one each at least")
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {number + 1}: expected fields p, g and t, got {error!r}.") from error
            (train if number % HELD_EVERY else held).append(sequence)
    if not train:
        raise ValueError(f"{path} holds {len(train) + len(held)} sequences; give at least 2.")
    return train, held


@torch.no_grad()
def compute_features(
    target: PreTrainedModel, sequences: Iterable[TokenSequence], target_layer_ids: list[int], batch_size: int = 16
) -> list[TargetFeatures]:
    """Runs the target once over each sequence and keeps what training needs, in the target's dtype, on the CPU.

    Memory: (taps + 1) * hidden values per token; 4.5 GB for SmolLM2's 0.8M tokens with 4 taps in bfloat16.
    """
    ordered = sorted(sequences, key=lambda sequence: len(sequence.tokens))  # equal lengths together: little padding
    features = []
    for start in tqdm(range(0, len(ordered), batch_size), desc="target features"):
        batch = ordered[start : start + batch_size]
        ids = torch.nn.utils.rnn.pad_sequence([sequence.tokens for sequence in batch], batch_first=True)
        # Right padding: causal attention keeps it out of the real tokens' states.
        outputs = target.base_model(ids.to(target.device), output_hidden_states=True, use_cache=False)
        context = torch.cat([outputs.hidden_states[i + 1] for i in target_layer_ids], dim=-1).cpu()
        final = outputs.last_hidden_state.cpu()
        for row, sequence in enumerate(batch):
            length = len(sequence.tokens)
            features.append(TargetFeatures(sequence, context[row, :length].clone(), final[row, :length].clone()))
    return features
