"""The decoding loop, its result, and its registration with transformers."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationMixin, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GENERATION_MODES_MAPPING

from .acceptance import Accepted
from .cache import recording
from .configuration import DDTreeConfig, DDTreeMode
from .drafting import DDTreeCandidateGenerator
from .emission import Emission
from .noise import row_streams
from .rules import AcceptanceRule, make_rule
from .streaming import stream_round
from .target import Target, check_rope, check_target
from .tree import Tree

STAGES = ("draft", "build", "verify", "accept", "commit")


@dataclass
class DDTreeOutput(GenerateDecoderOnlyOutput):
    """What `generate` returns with `return_dict_in_generate=True`: the usual fields, and the figures of the rounds.

    Attributes:
        acceptance_lengths: tokens committed by each round, bonus token included; the first round is the prefill, whose
            tree is the root alone, so its entry is 1.
        rounds: target forwards, the prefill included.
        verified_nodes: drafted nodes that went through the target, roots left out.
        stage_seconds: wall time of draft, build, verify (prefill left out), accept and commit, and of the prefill.
            On an accelerator work is queued and shows up in whichever stage waits for it, unless
            `DDTreeConfig(synchronize_stages=True)`.
        seed: of the sampling noise, the config's or the one drawn; None for greedy decoding.
    """

    acceptance_lengths: list[int] | None = None
    rounds: int | None = None
    verified_nodes: int | None = None
    stage_seconds: dict[str, float] | None = None
    seed: int | list[int] | None = None

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per drafted round: the prefill's token left out."""
        lengths = (self.acceptance_lengths or [])[1:]
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

    Each round commits the longest path of the tree that the target itself would have taken, plus one token. Source:
    DDTree, https://arxiv.org/abs/2604.12989.

    Returns:
        [1, length] token ids, or a `DDTreeOutput`.
    """
    try:
        unset = {"synced_gpus": synced_gpus, "assistant_tokenizer": assistant_tokenizer}
        check_request(self, input_ids, generation_config, model_kwargs, unset)
        drafter = DDTreeCandidateGenerator(assistant_model, self, generation_config)
        target = Target(self, model_kwargs, drafter.target_layer_ids)
        padding = count_padding(input_ids, model_kwargs.get("attention_mask"))
        emission = Emission(input_ids, logits_processor, stopping_criteria, generation_config, padding)
        seed = draw_seed(generation_config)
        rule = make_rule(generation_config, emission, None if seed is None else row_streams(seed, 1)[0])
        figures = Figures(self.device if generation_config.synchronize_stages else None)
        with recording(target.cache):
            decode_rounds(target, drafter, rule, emission, figures, streamer)
    finally:
        if streamer is not None:
            streamer.end()

    sequences = emission.ids.clone()
    if not generation_config.return_dict_in_generate:
        return sequences
    return DDTreeOutput(
        sequences=sequences,
        scores=tuple(emission.scores) if emission.scores is not None else None,
        logits=tuple(emission.raw_logits) if emission.raw_logits is not None else None,
        acceptance_lengths=figures.acceptance_lengths,
        rounds=len(figures.acceptance_lengths),
        verified_nodes=figures.verified_nodes,
        stage_seconds=figures.seconds,
        seed=seed,
        **{target.cache_name: target.cache},
    )


def decode_rounds(
    target: Target,
    drafter: DDTreeCandidateGenerator,
    rule: AcceptanceRule,
    emission: Emission,
    figures: "Figures",
    streamer: BaseStreamer | None,
) -> None:
    """The decoding loop: draft, build, verify, accept, commit, until generation ends."""
    with figures.stage("prefill"):
        outputs = target.prefill(emission.ids, drafter.config)
    tree = rule.build(emission.ids.new_zeros(1, 1), None)  # the prefill verified the root alone: the last prompt token
    with target.model._optimize_model_for_decode():
        while True:
            with figures.stage("accept"), target.undoing(tree):
                accepted = rule.accept(tree, outputs.logits[:, -tree.num_nodes :])
            with figures.stage("commit"):
                context = target.commit(outputs, tree.num_nodes, accepted)
            figures.count(tree, accepted)
            stream_round(streamer, tree, accepted)
            if accepted.finished:
                break
            root = emission.ids[:, -1:]
            with figures.stage("draft"):
                draft = drafter.draft(emission.ids, context, max_depth=emission.remaining - 1)
            with figures.stage("build"):
                tree = rule.build(root, draft)
            with figures.stage("verify"):
                outputs = target.verify(tree)


def draw_seed(config: DDTreeConfig) -> int | list[int] | None:
    """The config's seed; one from torch's default generator if it has none, so `set_seed` fixes it; None if greedy."""
    if not config.do_sample or config.seed is not None:
        return config.seed if config.do_sample else None
    return int(torch.randint(2**62, ()))


def count_padding(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> int:
    """Padded tokens of a prompt [1, length]; a prompt of embeddings has no ids, so none of it counts."""
    return 0 if attention_mask is None else int((attention_mask[:, : input_ids.shape[1]] == 0).sum())


class Figures:
    """Counts and stage times of a run.

    Args:
        device: whose queue to drain at the end of each stage; None = never wait for it.
    """

    def __init__(self, device: torch.device | None):
        self.device = device
        self.seconds = dict.fromkeys(("prefill", *STAGES), 0.0)
        self.acceptance_lengths: list[int] = []
        self.verified_nodes = 0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Adds the wall time of the block to stage `name`."""
        started = time.perf_counter()
        yield
        if self.device is not None and self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        self.seconds[name] += time.perf_counter() - started

    def count(self, tree: Tree, accepted: Accepted) -> None:
        """Counts one committed round."""
        self.acceptance_lengths.append(len(accepted.tokens))
        self.verified_nodes += tree.num_nodes - 1


def check_request(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    config: DDTreeConfig,
    model_kwargs: dict[str, Any],
    options: dict[str, Any],
) -> None:
    """Refuses what the strategy cannot do, before the first forward; raises ValueError.

    Args:
        options: arguments of `generate` that must be unset.
    """
    if input_ids.shape[0] > 1:
        raise ValueError(
            f"The batch size is {input_ids.shape[0]}; DDTree decoding works on one sequence at a time: call `generate` "
            "once per row."
        )
    if config.return_dict_in_generate:
        for name in ("output_attentions", "output_hidden_states"):
            if getattr(config, name):
                raise ValueError(f"`{name}=True` can't be returned by DDTree decoding; leave it off.")
    for name, value in options.items():
        if value:
            raise ValueError(f"`{name}={value!r}` does not go with DDTree decoding; leave it out.")
    check_target(model)
    if (positions := model_kwargs.get("position_ids")) is not None:
        check_rope(model, int(positions.max()) + 1 + config.max_length - input_ids.shape[1])


def register() -> None:
    """Makes `generate` dispatch a `DDTreeConfig` to the loop: one enum member and one method, process-wide."""
    GenerationMixin._ddtree_decoding = ddtree_decoding
    GENERATION_MODES_MAPPING[DDTreeMode.DDTREE] = "_ddtree_decoding"
