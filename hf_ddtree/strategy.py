"""The decoding loop, its result, and its registration with transformers."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationMixin, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GENERATION_MODES_MAPPING

from .cache import is_callers
from .configuration import DDTreeConfig, DDTreeMode
from .drafting import make_drafter
from .emission import Emissions
from .figures import Figures
from .rounds import SafeRounds
from .rules import AcceptanceRule, make_rule
from .streaming import RoundStreamer, Streaming
from .target import Target, check_inputs, check_rope, check_target


@dataclass
class DDTreeOutput(GenerateDecoderOnlyOutput):
    """What `generate` returns with `return_dict_in_generate=True`: the usual fields, and the figures of the rounds.

    Attributes:
        acceptance_lengths: tokens committed by each round, bonus token included; the first round is the prefill, whose
            tree is the root alone, so its entry is 1. For a batch a list of that for each row.
        rounds: target forwards, the prefill included.
        verified_nodes: drafted nodes that went through the target, roots left out; of all rows.
        budgets: the same by round and per row; 0 = decoded plainly. The first round is the prefill.
        shapes: rounds by what they verified, the prefill left out: "plain" (no draft), "chain" (no two nodes at one
            depth) or "tree".
        fallback_rounds: how many rounds were decoded plainly or with smaller trees, by cause: "draft" (the drafter or
            the building of a tree raised), "nan" (a draft had NaN in it), "memory" (no memory for the whole tree).
        stage_seconds: wall time of draft, build, verify (prefill left out), accept and commit, and of the prefill.
            On an accelerator work is queued and shows up in whichever stage waits for it, unless
            `DDTreeConfig(synchronize_stages=True)`.
        seed: of the sampling noise, the config's or the one drawn; None for greedy decoding.
    """

    acceptance_lengths: list[int] | list[list[int]] | None = None
    rounds: int | None = None
    verified_nodes: int | None = None
    budgets: list[int] | None = None
    shapes: dict[str, int] | None = None
    fallback_rounds: dict[str, int] | None = None
    stage_seconds: dict[str, float] | None = None
    seed: int | list[int] | None = None

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per row and drafted round: the prefill's token left out."""
        rows = self.acceptance_lengths or []
        rows = rows if rows and isinstance(rows[0], list) else [rows]
        lengths = [length for row in rows for length in row[1:]]
        return sum(lengths) / len(lengths) if lengths else 1.0


@torch.no_grad()
def ddtree_decoding(  # noqa: PLR0913 - the signature that `generate` calls decoding methods with
    self: PreTrainedModel,
    input_ids: torch.LongTensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: DDTreeConfig,
    synced_gpus: bool = False,
    streamer: BaseStreamer | None = None,
    assistant_model: Any = None,
    tokenizer: Any = None,
    assistant_tokenizer: Any = None,
    **model_kwargs: Any,
) -> DDTreeOutput | torch.Tensor:
    """Lossless decoding with draft trees; called by `generate` for a `DDTreeConfig`.

    Each round commits, in each row, the longest path of its tree that the target itself would have taken, plus one
    token. Source: DDTree, https://arxiv.org/abs/2604.12989.

    Returns:
        [batch, length] token ids, or a `DDTreeOutput`.
    """
    try:
        check_request(self, generation_config, (input_ids, model_kwargs), synced_gpus, streamer)
        rows, tokenizers = len(input_ids), (tokenizer, assistant_tokenizer)
        drafter = make_drafter(assistant_model, self, generation_config, rows, tokenizers)
        drafter.start(self, generation_config, rows)
        target = Target(self, model_kwargs, list(drafter.target_layer_ids), generation_config.compile)
        padding = count_padding(input_ids, model_kwargs.get("attention_mask"))
        emissions = Emissions(input_ids, logits_processor, stopping_criteria, generation_config, padding)
        seed = draw_seed(generation_config)
        rule = make_rule(generation_config, emissions, seed)
        figures = Figures(emissions, input_ids.device if generation_config.synchronize_stages else None)
        rounds = SafeRounds(target, drafter, rule, figures)
        decode_rounds(target, rounds, rule, emissions, figures, Streaming(streamer, emissions))
    finally:
        if streamer is not None:
            streamer.end()

    fallback_rounds = figures.fallback_rounds
    if not generation_config.return_dict_in_generate:
        return emissions.sequences
    return DDTreeOutput(
        sequences=emissions.sequences,
        scores=emissions.steps("scores"),
        logits=emissions.steps("raw_logits"),
        acceptance_lengths=figures.acceptance_lengths if rows > 1 else figures.acceptance_lengths[0],
        rounds=figures.rounds,
        verified_nodes=figures.verified_nodes,
        budgets=figures.budgets,
        shapes=figures.shapes,
        fallback_rounds=fallback_rounds,
        stage_seconds=figures.seconds,
        seed=seed,
        **{target.cache_name: target.cache},
    )


def decode_rounds(
    target: Target,
    rounds: SafeRounds,
    rule: AcceptanceRule,
    emissions: Emissions,
    figures: Figures,
    streaming: Streaming,
) -> None:
    """The decoding loop: draft, build, verify, accept, commit, until all texts have ended."""
    rounds.resume()
    with figures.stage("prefill"):
        logits = target.prefill(emissions.prompts, emissions.config)
    tree = rule.build(emissions.prompts.new_zeros(len(logits), 1), None)  # the prompts' last tokens, verified alone
    with target.growing():
        rounds.prepare(emissions)
        while True:
            with figures.stage("accept"), target.undoing():
                accepted = rule.accept(tree, logits)
            with figures.stage("commit"):
                rounds.learn(target.commit(accepted))
            figures.count(tree, accepted)
            rounds.judge(tree, accepted)
            streaming.put(tree, accepted)
            staying = emissions.drop_ended()
            if not staying:
                break
            rounds.keep(staying)
            with figures.stage("draft"):
                drafted = rounds.draft(emissions)
            with figures.stage("build"):
                tree = rounds.build(emissions.roots, drafted)
            with figures.stage("verify"):
                tree, logits = rounds.verify(tree)
        if emissions.config.return_dict_in_generate or is_callers(target.cache):
            target.settle(emissions.last_tokens)
    rounds.leave()


def draw_seed(config: DDTreeConfig) -> int | list[int] | None:
    """The config's seed; one from torch's default generator if it has none, so `set_seed` fixes it; None if greedy."""
    if not config.do_sample or config.seed is not None:
        return config.seed if config.do_sample else None
    return int(torch.randint(2**62, ()))


def count_padding(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> list[int]:
    """Padded tokens of each prompt [batch, length]; a prompt of embeddings has no ids, so none of it counts."""
    if attention_mask is None:
        return [0] * len(input_ids)
    return (attention_mask[:, : input_ids.shape[1]] == 0).sum(1).tolist()


def check_request(
    model: PreTrainedModel,
    config: DDTreeConfig,
    inputs: tuple[torch.Tensor, dict[str, Any]],
    synced_gpus: bool,
    streamer: BaseStreamer | None,
) -> None:
    """Refuses what the strategy cannot do, before the first forward; raises ValueError.

    Args:
        inputs: the prompts' ids, and the arguments of the model's forward.
    """
    input_ids, model_kwargs = inputs
    if config.return_dict_in_generate:
        for name in ("output_attentions", "output_hidden_states"):
            if getattr(config, name):
                raise ValueError(f"`{name}=True` can't be returned by DDTree decoding; leave it off.")
    if synced_gpus:
        raise ValueError("`synced_gpus=True` does not go with DDTree decoding; leave it out.")
    if isinstance(streamer, RoundStreamer) and len(input_ids) > 1:
        raise ValueError(
            f"`streamer` is {type(streamer).__name__}, which shows one text, and the batch has {len(input_ids)} rows; "
            "leave it out, or generate row by row."
        )
    check_target(model)
    check_inputs(model, model_kwargs)
    if (positions := model_kwargs.get("position_ids")) is not None:
        check_rope(model, int(positions.max()) + 1 + config.max_length - input_ids.shape[1])


def register() -> None:
    """Makes `generate` dispatch a `DDTreeConfig` to the loop: one enum member and one method, process-wide."""
    GenerationMixin._ddtree_decoding = ddtree_decoding
    GENERATION_MODES_MAPPING[DDTreeMode.DDTREE] = "_ddtree_decoding"
