"""Which draft settings commit most tokens a round, judged on sampled texts that are the same for all of them.

Keyed noise makes the text a function of target and seed alone, so it is sampled once, and every setting is judged by
replaying the rounds over it: no target forward per setting.
"""

import itertools
from copy import copy
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..configuration import DDTreeConfig
from ..drafting.corrections import Corrections
from ..models import DFlashDraftModel
from ..noise import NoiseRows
from ..processors import plain_sampling_processors
from ..training.data import TokenSequence, compute_features
from ..training.evaluation import drafts_over
from .statistics import ratio_of_sums, rounded, with_error

SCALES = (0.0, 0.5, 0.75, 0.9, 1.0, 1.25)
DRAFT_TEMPERATURES = (0.7, 0.85, 1.0, 1.3)


@torch.no_grad()
def scan(
    target: PreTrainedModel, drafter: DFlashDraftModel, prompts: list[torch.Tensor], config: DDTreeConfig
) -> list[dict[str, Any]]:
    """A row per (draft_noise_scale, draft_temperature): the mean acceptance length and its standard error.

    Args:
        prompts: [length] each.
        config: temperature, budget, tree shape, and length of the texts; the prompts' seeds count up from its seed,
            since texts that share their noise would not be independent.
    """
    settings = list(itertools.product(SCALES, DRAFT_TEMPERATURES))
    rounds: dict[tuple[float, float], list[list[int]]] = {setting: [] for setting in settings}
    for index, prompt in enumerate(tqdm(prompts, desc="replaying", leave=False, disable=None)):
        seed = config.seed + index
        text = sample_text(target, prompt, config, seed)
        if text.answer_length < 2:
            continue
        (item,) = compute_features(target, [text], drafter.config.target_layer_ids)
        drafts = drafts_over(drafter, target, item)
        anchors, depth, _ = drafts.logits.shape
        rows = torch.stack(NoiseRows(seed)(text.prompt_length + 1, anchors + depth - 1, like=drafts.logits)).float()
        noise = config.sampling_temperature * rows.unfold(0, depth, 1).transpose(1, 2)  # as logits
        corrections = Corrections(drafter, target, config)
        for scale, temperature in settings:
            setting = copy(config)
            setting.draft_temperature = temperature
            rounds[scale, temperature].append(drafts.rounds(setting, corrections, scale * noise))
    return [_row(setting, texts) for setting, texts in rounds.items()]


def sample_text(target: PreTrainedModel, prompt: torch.Tensor, config: DDTreeConfig, seed: int) -> TokenSequence:
    """The text that `config` samples with `seed` after `prompt` [length], by plain decoding."""
    processors = plain_sampling_processors(target, config, seed=seed)
    ids = prompt[None].to(target.device)
    call = {"attention_mask": torch.ones_like(ids), "max_new_tokens": config.max_new_tokens}
    output = target.generate(ids, do_sample=False, logits_processor=processors, **call)
    return TokenSequence(output[0].cpu(), len(prompt), config.sampling_temperature)


def scan_table(rows: list[dict[str, Any]]) -> str:
    """Noise scales down, draft temperatures across."""
    cells = {(row["draft_noise_scale"], row["draft_temperature"]): row for row in rows}
    lines = ["scale \\ draft temperature" + "".join(f"{temperature:>14}" for temperature in DRAFT_TEMPERATURES)]
    for scale in SCALES:
        row = [cells[scale, temperature] for temperature in DRAFT_TEMPERATURES]
        values = "".join(f"{with_error(cell['acceptance_length'], cell['standard_error']):>14}" for cell in row)
        lines.append(f"{scale:<25}{values}")
    return "\n".join(lines)


def _row(setting: tuple[float, float], texts: list[list[int]]) -> dict[str, Any]:
    mean, error = ratio_of_sums([sum(rounds) for rounds in texts], [len(rounds) for rounds in texts])
    return {
        "draft_noise_scale": setting[0],
        "draft_temperature": setting[1],
        "acceptance_length": rounded(mean),
        "standard_error": rounded(error),
    }
